"""Products with a weight matrix of 8-bit integers, packed once: y = x W^T + b, with x quantised as it arrives.

What is computed is defined in `pagemill.kernels.grouped_int8`: sums within a group of inputs are integers, hence exact,
and over the groups each number of the result is one chain of fp32 multiply-adds in the groups' order. So it depends on
its row and its channel alone, to the last bit, whatever the number of rows or threads and whatever the CPU.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import NUMBERS_PER_THREAD, f32_pointer, jit, use_torch_threads
from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.jit.row import F32, VECTOR, line_in
from pagemill.kernels.cpu.matmul.fp32_panel import (
    SUMS_BYTES,
    Strided,
    Tiles,
    Weight,
    num_panels_of,
    skip_rows,
    sums_at,
)
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS, PANEL, first_row, num_tiles_of
from pagemill.kernels.cpu.matmul.int8_rows import quantise_rows
from pagemill.kernels.cpu.matmul.int8_tile import (
    PANEL_BYTES,
    QUAD,
    QUADS,
    ROW_BYTES,
    WEIGHT_BYTES,
    ZERO_POINT,
    multiply_tile,
)
from pagemill.kernels.cpu.matmul.work_sharing import (
    BLOCK_ROWS,
    FEWEST_ROWS,
    are_rows_taken,
    new_counter,
    panels_per_turn,
    plan_blocks,
    take,
)
from pagemill.kernels.grouped_int8 import GROUP

# So much of x stays in the second-level cache while all panels pass by.
_BLOCK_BYTES = 1 << 19
# So much of a panel stays in the first-level cache while all tiles of a block pass by.
_PIECE_GROUPS = 9
NO_FORMAT = -1  # of `Weight`: all these weights lie alike
_PACKED_AT_ONCE = 1 << 22  # weights: packing makes several copies of them


def pack(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [num_panels, num_groups, bytes] of a weight [out_features, in_features], ends filled up with zeros."""
    out_features, in_features = weight.shape
    num_panels, num_groups = -(-out_features // PANEL), grouped_int8.num_groups(in_features)
    packed = torch.empty(num_panels, num_groups, PANEL_BYTES, dtype=torch.uint8)
    advise_huge_pages(packed)
    at_once = max(1, _PACKED_AT_ONCE // (PANEL * in_features))
    for first in range(0, num_panels, at_once):
        channels = weight[first * PANEL : (first + at_once) * PANEL]
        numbers, scales = grouped_int8.quantise(
            torch.nn.functional.pad(channels, (0, 0, 0, -len(channels) % PANEL))
        )
        target = packed[first : first + at_once]
        quads = (numbers.to(torch.int16) + ZERO_POINT).to(torch.uint8)
        quads = quads.view(-1, PANEL, num_groups, QUADS, QUAD).permute(0, 2, 3, 1, 4)
        target[:, :, :WEIGHT_BYTES] = quads.reshape(-1, num_groups, WEIGHT_BYTES)
        scales = scales.view(-1, PANEL, num_groups).transpose(1, 2).contiguous()
        target[:, :, WEIGHT_BYTES:] = scales.view(torch.uint8).view(-1, num_groups, PANEL * F32)
    return packed


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times `pack`ed weights, plus bias [num_panels * PANEL]; fresh and contiguous."""
    num_rows, in_features = x.shape
    assert x.dtype is torch.float32
    assert x.stride(1) == 1 or in_features == 1
    assert packed.shape[1] == grouped_int8.num_groups(in_features)
    out = torch.empty((num_rows, out_features))
    if num_rows:
        multiply_parallel(
            out.data_ptr(),
            x.data_ptr(),
            x.stride(0),
            packed.data_ptr(),
            NO_FORMAT,
            bias.data_ptr(),
            num_rows,
            out_features,
            in_features,
            use_torch_threads(),
        )
    return out


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from the disk, so that no step pays for it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL), 1)


@jit
def num_groups_of(weight):
    return (weight.in_features + GROUP - 1) // GROUP


@jit
def sum_panel(sums, rows, weight, panel, following, tiles):
    """sums = the bias of a panel's channels + rows @ the panel, for some tiles; `sums` as `sums_at` makes it.

    A panel passes by in pieces that the first-level cache holds. The tiles fetch a share each of what comes next, the
    panel `following` at the end: memory works while the registers do.
    """
    num_groups = num_groups_of(weight)
    size = PANEL_BYTES * num_groups
    address, after = weight.panels + size * panel, weight.panels + size * following
    begin, end = first_row(tiles.low, tiles.num_rows), first_row(tiles.high, tiles.num_rows)
    bias = weight.bias + F32 * PANEL * panel
    start0, start1 = vector.load(bias), vector.load(bias + VECTOR)
    for row in range(begin, end):
        vector.store(sums.rows + sums.stride * row, start0)
        vector.store(sums.rows + sums.stride * row + VECTOR, start1)
    for group in range(0, num_groups, _PIECE_GROUPS):
        count = min(_PIECE_GROUPS, num_groups - group)
        ahead = address + PANEL_BYTES * (group + count) if group + count < num_groups else after
        first = begin
        for tile in range(tiles.low, tiles.high):
            last = first_row(tile + 1, tiles.num_rows)
            multiply_tile(
                last - first,
                sums.rows + sums.stride * first,
                rows + ROW_BYTES * (num_groups * first + (last - first) * group),
                address + PANEL_BYTES * group,
                count,
                ahead + PANEL_BYTES * count * (tile - tiles.low) // (tiles.high - tiles.low),
                PANEL * QUAD // (tiles.high - tiles.low),
            )
            first = last


@jit
def _multiply_channels(out, rows, weight, panel, following, tiles, memory):
    """One panel; `memory` is the address of SUMS_BYTES."""
    sums = sums_at(memory, tiles)
    sum_panel(sums, rows, weight, panel, following, tiles)
    channel = panel * PANEL
    width = min(PANEL, weight.out_features - channel)
    for row in range(first_row(tiles.low, tiles.num_rows), first_row(tiles.high, tiles.num_rows)):
        source, target = sums.rows + sums.stride * row, out.rows + row * out.stride + F32 * channel
        if width == PANEL:
            vector.store(target, vector.load(source))
            vector.store(target + VECTOR, vector.load(source + VECTOR))
        else:
            for i in range(width):
                f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def tiles_at_once(weight):
    """As many as stay in the second-level cache while all panels pass by."""
    by_bytes = _BLOCK_BYTES // (ROW_BYTES * num_groups_of(weight) * MOST_ROWS)
    return max(FEWEST_ROWS // MOST_ROWS, min(by_bytes, BLOCK_ROWS // MOST_ROWS))


@jit
def _multiply_blocks(first, last, out, rows, num_rows, weight, memory):
    """The panels first .. last - 1 of every row."""
    num_tiles, at_once = num_tiles_of(num_rows), tiles_at_once(weight)
    num_blocks = (num_tiles + at_once - 1) // at_once
    for block in range(num_blocks):
        tiles = Tiles(num_tiles * block // num_blocks, num_tiles * (block + 1) // num_blocks, num_rows)
        for panel in range(first, last):
            _multiply_channels(out, rows, weight, panel, panel + 1, tiles, line_in(memory))


@jit
def _take_panels(counter, num_threads, out, rows, num_rows, weight, memory):
    tiles, num_panels = Tiles(0, num_tiles_of(num_rows), num_rows), num_panels_of(weight)
    per_turn = panels_per_turn(num_panels, num_threads)
    num_turns = (num_panels + per_turn - 1) // per_turn
    turn = take(line_in(counter))
    while turn < num_turns:
        next_turn = take(line_in(counter))
        last = min((turn + 1) * per_turn, num_panels)
        for panel in range(turn * per_turn, last):
            following = panel + 1 if panel + 1 < last else next_turn * per_turn
            _multiply_channels(out, rows, weight, panel, following, tiles, line_in(memory))
        turn = next_turn


@jit
def multiply_quantised(out, rows, num_rows, weight):
    """All channels of every row, by one thread; `rows` is the address of what `quantise_rows` wrote."""
    memory = np.empty(SUMS_BYTES + VECTOR, np.uint8)
    _multiply_blocks(0, num_panels_of(weight), out, rows, num_rows, weight, memory)


@jit
def multiply_share(thread, num_threads, counter, out, rows, num_rows, weight):
    """One thread's part of a product whose threads have all rows of some panels each.

    Threads take panels as long as the rows stay in their second-level caches. With more of them, shares are fixed.
    """
    memory = np.empty(SUMS_BYTES + VECTOR, np.uint8)
    if num_tiles_of(num_rows) <= tiles_at_once(weight):
        _take_panels(counter, num_threads, out, rows, num_rows, weight, memory)
    else:
        num_panels = num_panels_of(weight)
        first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
        _multiply_blocks(first, last, out, rows, num_rows, weight, memory)


@jit
def workspace_bytes(num_rows, weight):
    """Room for quantised rows, from a line on."""
    return num_rows * num_groups_of(weight) * ROW_BYTES + VECTOR


@jit
def _multiply_block_in(workspace, out, x, num_rows, weight):
    rows = line_in(workspace)
    quantise_rows(0, num_rows, num_rows, x.rows, x.stride // F32, rows, weight.in_features)
    multiply_quantised(out, rows, num_rows, weight)


@jit
def multiply_rows(out, x, num_rows, weight):
    """All channels of every row, quantised here, by one thread. `x` and `out` are `Strided`."""
    workspace = np.empty(workspace_bytes(num_rows, weight), np.uint8)
    _multiply_block_in(workspace, out, x, num_rows, weight)


@jit
def multiply_block(out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features):
    """Run `multiply_parallel` on one thread."""
    weight = Weight(packed, NO_FORMAT, bias, out_features, in_features)
    multiply_rows(Strided(out, F32 * out_features), Strided(x, F32 * x_stride), num_rows, weight)


@jit(exact=True)
def quantise_part(first, last, num_rows, x, x_stride, workspace, in_features):
    quantise_rows(first, last, num_rows, x, x_stride, line_in(workspace), in_features)


@jit(parallel=True)
def _quantise_parallel(workspace, x, x_stride, num_rows, in_features, num_threads):
    for thread in prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        quantise_part(first, last, num_rows, x, x_stride, workspace, in_features)


@jit
def quantise(workspace, x, x_stride, num_rows, in_features, num_threads):
    """All rows to their places in the workspace, by one thread or all."""
    if num_rows * in_features < 2 * NUMBERS_PER_THREAD:
        quantise_part(0, num_rows, num_rows, x, x_stride, workspace, in_features)
    else:
        _quantise_parallel(workspace, x, x_stride, num_rows, in_features, num_threads)


@jit
def _multiply_part(
    thread, num_threads, counter, out, workspace, packed, bias, num_rows, out_features, in_features
):
    weight = Weight(packed, NO_FORMAT, bias, out_features, in_features)
    target = Strided(out, F32 * out_features)
    multiply_share(thread, num_threads, counter, target, line_in(workspace), num_rows, weight)


@jit
def _multiply_taken_rows(counter, bounds, out, x, x_stride, packed, bias, out_features, in_features):
    weight = Weight(packed, NO_FORMAT, bias, out_features, in_features)
    source, target = Strided(x, F32 * x_stride), Strided(out, F32 * out_features)
    block = take(line_in(counter))
    while block < len(bounds) - 1:
        low, high = bounds[block], bounds[block + 1]
        multiply_rows(skip_rows(target, low), skip_rows(source, low), high - low, weight)
        block = take(line_in(counter))


@jit(parallel=True)
def multiply_parallel(
    out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
):
    """Takes what `cpu_matmul.multiply_parallel` takes, of any format; x is quantised here."""
    counter = new_counter()
    # As there: rows are shared out where each thread then has a block of them. No thread waits for another's.
    if are_rows_taken(num_rows, num_threads):
        bounds = plan_blocks(num_rows, num_threads)
        for _ in prange(num_threads):
            _multiply_taken_rows(counter, bounds, out, x, x_stride, packed, bias, out_features, in_features)
        return
    weight = Weight(packed, NO_FORMAT, bias, out_features, in_features)
    workspace = np.empty(workspace_bytes(num_rows, weight), np.uint8)
    quantise(workspace, x, x_stride, num_rows, in_features, num_threads)
    for thread in prange(num_threads):
        _multiply_part(
            thread, num_threads, counter, out, workspace, packed, bias, num_rows, out_features, in_features
        )
