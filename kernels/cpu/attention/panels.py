"""Gather keys and values from cache slots into fp32 panels, the operands of the matmul tiles."""

from __future__ import annotations

from pagemill.kernels.cpu.attention.operands import block_bytes_of, key_bytes_of, scale_bytes_of
from pagemill.kernels.cpu.jit.compiler import f32_pointer, jit
from pagemill.kernels.cpu.jit.element import load_number, load_vector, size_of, transpose
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.vector import LANES, store
from pagemill.kernels.cpu.matmul.bf16_rows import pair_lines
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL

PANEL_ROW = F32 * PANEL  # bytes


@jit
def gather_keys(panels, depth, cache, table, low, high, origin):
    """panels[p, i, j] = value i of key origin + p * PANEL + j, for keys low .. high - 1.

    Panels are [any, depth, PANEL]; values past head_dim are not written. `cache` is that of the KV head.
    """
    block_size, key_bytes = cache.block_size, key_bytes_of(cache)
    for block in range(low // block_size, (high - 1) // block_size + 1):
        first, last = max(low, block * block_size), min(high, (block + 1) * block_size)
        source = cache.keys + table[block] * block_bytes_of(cache) + (first - block * block_size) * key_bytes
        _transpose(panels, depth, cache.element, source, first - origin, last - first, cache.head_dim)


@jit
def _transpose(panels, depth, element, source, column, num_keys, head_dim):
    """Store `num_keys` contiguous keys as columns from `column`, in 16 x 16 blocks where they fit."""
    size = size_of(element)
    whole_keys = num_keys // LANES * LANES if column % LANES == 0 else 0
    whole_numbers = head_dim // LANES * LANES
    for key in range(0, whole_keys, LANES):
        panel, j = (column + key) // PANEL, (column + key) % PANEL
        target = panels + PANEL_ROW * depth * panel + F32 * j
        for i in range(0, whole_numbers, LANES):
            at = source + size * (head_dim * key + i)
            transpose(target + PANEL_ROW * i, PANEL_ROW, element, at, size * head_dim)
    for key in range(num_keys):
        panel, j = (column + key) // PANEL, (column + key) % PANEL
        target = panels + PANEL_ROW * depth * panel + F32 * j
        for i in range(whole_numbers if key < whole_keys else 0, head_dim):
            number = load_number(element, source + size * (head_dim * key + i))
            f32_pointer(target + PANEL_ROW * i)[0] = number


@jit
def gather_values(panels, num_keys, cache, table, low, high, origin):
    """panels[p, key - origin, i] = element p * PANEL + i of the value at `key`, for keys low .. high - 1.

    Panels are [any, num_keys, PANEL]; elements past head_dim are not written. `cache` is that of the KV head.
    """
    element, head_dim, block_size = cache.element, cache.head_dim, cache.block_size
    size = size_of(element)
    whole = head_dim // LANES * LANES
    for block in range(low // block_size, (high - 1) // block_size + 1):
        start = block * block_size
        for key in range(max(low, start), min(high, start + block_size)):
            source = cache.values + table[block] * block_bytes_of(cache) + size * head_dim * (key - start)
            target = panels + PANEL_ROW * (key - origin)
            for i in range(0, whole, LANES):
                to = target + PANEL_ROW * num_keys * (i // PANEL) + F32 * (i % PANEL)
                store(to, load_vector(element, source + size * i))
            for i in range(whole, head_dim):
                to = target + PANEL_ROW * num_keys * (i // PANEL) + F32 * (i % PANEL)
                f32_pointer(to)[0] = load_number(element, source + size * i)


@jit
def pair_rows(panels, num_panels, num_rows):
    """Pack panels [num_panels, num_rows, PANEL] of bfloat16 values for `bf16_tile`, in place.

    Two rows become one row of pairs. The second half of each panel's memory keeps stale data.
    """
    for panel in range(num_panels):
        base = panels + PANEL_ROW * num_rows * panel
        for pair in range(num_rows // 2):
            first, target = base + 2 * PANEL_ROW * pair, base + PANEL_ROW * pair
            for at in range(0, PANEL_ROW, VECTOR):
                pair_lines(first + at, first + PANEL_ROW + at, target + at)


@jit
def gather_scales(target, scales, cache, table, low, high, origin):
    """target[key - origin] = the scale of the key's slot, for keys low .. high - 1 of one KV head.

    `scales` are those of the cache's keys or of its values.
    """
    block_size = cache.block_size
    for block in range(low // block_size, (high - 1) // block_size + 1):
        first, last = max(low, block * block_size), min(high, (block + 1) * block_size)
        source = f32_pointer(
            scales + table[block] * scale_bytes_of(cache) + F32 * (first - block * block_size)
        )
        for j in range(last - first):
            f32_pointer(target + F32 * (first - origin))[j] = source[j]


@jit
def num_common_blocks(table, other, count):
    """Count how many of the first `count` blocks two rows share, from the start."""
    block = 0
    while block < count and table[block] == other[block]:
        block += 1
    return block
