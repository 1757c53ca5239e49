"""Matmuls with a weight matrix that is packed once, in fp32: y = x W^T + b.

Weights are stored in panels of 32 output channels, input by input. A tile of the result (some rows by 32
channels) stays in registers while its panel is read as one contiguous stream. Every value of the result is
one chain of fused multiply-adds over the inputs in order. It depends only on its row and channel, to the last
bit, regardless of the number of rows or threads, and of the distribution of work among threads.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch

from pagemill.kernels.cpu.jit.compiler import compiles_for, external, f32_pointer, jit, use_torch_threads
from pagemill.kernels.cpu.jit.row import F32, VECTOR, line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.jit.vector import LANES
from pagemill.kernels.cpu.matmul.fp32_panel import (
    PIECE_BYTES,
    SUMS_BYTES,
    Lined,
    Strided,
    Tiles,
    Weight,
    bias_of,
    line_up,
    multiply_panel,
    num_panels_of,
    skip_rows,
    sums_at,
)
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS, PANEL, first_row, num_tiles_of
from pagemill.kernels.cpu.matmul.weight_formats import GROUP
from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight, pack
from pagemill.kernels.cpu.matmul.work_sharing import (
    BLOCK_ROWS,
    are_rows_taken,
    new_counter,
    panels_per_turn,
    plan_blocks,
    take,
)

# This much of BLOCK_ROWS rows stays in the L2 cache while all panels are processed.
BLOCK_INPUTS = 768
# With many rows and many panels, x is copied into lines first (`multiply_lined_tile`).
LINED_ROWS, LINED_PANELS = 28, 6
# A thread's memory: sums between pieces, the last panel's results, a piece of weights.
_NARROW, _PIECE = SUMS_BYTES, 2 * SUMS_BYTES
THREAD_BYTES = _PIECE + PIECE_BYTES
_LINED_BYTES = F32 * BLOCK_ROWS * (BLOCK_INPUTS + GROUP)


def is_supported() -> bool:
    """Return True if this CPU has the registers that the tiles need: AVX-512's or AVX2's."""
    return compiles_for("avx512f") or all(map(compiles_for, ("avx2", "fma", "f16c")))


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times the weight, plus bias [num_panels * PANEL]; new and contiguous."""
    assert x.dtype is torch.float32
    assert x.stride(1) == 1
    assert x.shape[1] == weight.in_features
    out = torch.empty((len(x), weight.out_features))
    if len(x) == 0:
        return out
    multiply_parallel(
        out.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        weight.panels.data_ptr(),
        weight.weight_format,
        bias.data_ptr(),
        len(x),
        weight.out_features,
        weight.in_features,
        use_torch_threads(),
    )
    return out


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL))


@jit
def _multiply_channels(out, x, lined, tiles, weight, panel, following, origin, begin, end, memory):
    """Multiply by one panel over inputs begin .. end - 1, adding to the sums of earlier inputs in `out`."""
    channel = panel * PANEL
    width = min(PANEL, weight.out_features - channel)
    target = Strided(out.rows + F32 * channel, out.stride)
    if width < PANEL:  # the last panel: `out` does not have space for the padded channels
        target = sums_at(memory + _NARROW, tiles)
    start = bias_of(weight, panel) if begin == 0 else target
    sums = sums_at(memory, tiles)
    multiply_panel(
        target, start, x, lined, tiles, weight, panel, following, origin, begin, end, memory + _PIECE, sums
    )
    if width < PANEL and end == weight.in_features:
        for row in range(first_row(tiles.low, tiles.num_rows), first_row(tiles.high, tiles.num_rows)):
            source, to = target.rows + row * target.stride, out.rows + row * out.stride + F32 * channel
            for i in range(width):
                f32_pointer(to)[i] = f32_pointer(source)[i]


@jit
def _part_begin(part, num_parts, in_features):
    return in_features if part == num_parts else in_features // GROUP * part // num_parts * GROUP


@jit
def _multiply_block(first, last, out, x, lines, tiles, weight, line_memory, memory):
    """Multiply these tiles by panels first .. last - 1.

    `line_memory` is where to copy x into lines; 0 means that x is not copied.
    """
    num_parts = (weight.in_features + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    for part in range(num_parts):
        begin = _part_begin(part, num_parts, weight.in_features)
        end = _part_begin(part + 1, num_parts, weight.in_features)
        origin = 0
        if line_memory:
            origin, num_lines = begin, (end - begin) // LANES
            lines = Lined(line_memory - VECTOR * num_lines * first_row(tiles.low, tiles.num_rows), num_lines)
            line_up(lines, Strided(x.rows + F32 * begin, x.stride), tiles)
        for panel in range(first, last):
            _multiply_channels(
                out,
                Strided(x.rows + F32 * origin, x.stride),
                lines,
                tiles,
                weight,
                panel,
                panel + 1,
                origin,
                begin,
                end,
                memory,
            )


@jit
def _multiply_blocks(first, last, out, x, lines, num_rows, weight, is_copied, memory):
    """Multiply every row by panels first .. last - 1.

    `memory` has THREAD_BYTES, plus _LINED_BYTES if x is copied.
    """
    num_tiles = num_tiles_of(num_rows)
    num_blocks = (num_tiles * MOST_ROWS + BLOCK_ROWS - 1) // BLOCK_ROWS
    address = line_in(memory)
    for block in range(num_blocks):
        tiles = Tiles(num_tiles * block // num_blocks, num_tiles * (block + 1) // num_blocks, num_rows)
        line_memory = address + THREAD_BYTES if is_copied else 0
        _multiply_block(first, last, out, x, lines, tiles, weight, line_memory, address)


@jit(allocates=True)
def multiply_rows(out, x, num_rows, weight):
    """Multiply every row by all panels, on one thread. `x` and `out` are `Strided`."""
    num_panels = num_panels_of(weight)
    is_copied = num_rows >= LINED_ROWS and num_panels >= LINED_PANELS
    memory = np.empty(THREAD_BYTES + (_LINED_BYTES if is_copied else 0) + VECTOR, np.uint8)
    _multiply_blocks(0, num_panels, out, x, Lined(0, 0), num_rows, weight, is_copied, memory)


@jit(allocates=True)
def multiply_range(first, last, out, x, num_rows, weight):
    """Multiply every row by panels first .. last - 1, on one thread; few rows use complete panels sequentially."""
    is_copied = num_rows >= LINED_ROWS and last - first >= LINED_PANELS
    memory = np.empty(THREAD_BYTES + (_LINED_BYTES if is_copied else 0) + VECTOR, np.uint8)
    lines = Lined(0, 0)
    if not fit_the_cache(num_rows, weight.in_features):
        _multiply_blocks(first, last, out, x, lines, num_rows, weight, is_copied, memory)
        return
    tiles, address = Tiles(0, num_tiles_of(num_rows), num_rows), line_in(memory)
    if is_copied:
        lines = Lined(address + THREAD_BYTES, weight.in_features // LANES)
        line_up(lines, x, tiles)
    for panel in range(first, last):
        _multiply_channels(out, x, lines, tiles, weight, panel, panel + 1, 0, 0, weight.in_features, address)


@external
def multiply_block(out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features):
    """Run `multiply_parallel` on one thread."""
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    multiply_rows(Strided(out, F32 * out_features), Strided(x, F32 * x_stride), num_rows, weight)


@jit(allocates=True)
def multiply_lined(out, lines, num_rows, weight):
    """`multiply_rows` for an x of complete lines that is already stored in lines."""
    memory = np.empty(THREAD_BYTES + VECTOR, np.uint8)
    _multiply_blocks(0, num_panels_of(weight), out, Strided(0, 0), lines, num_rows, weight, False, memory)


@jit
def _take_panels(counter, per_turn, out, x, lines, num_rows, weight, is_copied, memory):
    tiles, num_panels, address = (
        Tiles(0, num_tiles_of(num_rows), num_rows),
        num_panels_of(weight),
        line_in(memory),
    )
    if is_copied:
        lines = Lined(address + THREAD_BYTES, weight.in_features // LANES)
        line_up(lines, x, tiles)
    num_turns = (num_panels + per_turn - 1) // per_turn
    turn = take(counter)
    while turn < num_turns:
        next_turn = take(counter)
        last = min((turn + 1) * per_turn, num_panels)
        for panel in range(turn * per_turn, last):
            following = panel + 1 if panel + 1 < last else next_turn * per_turn
            _multiply_channels(
                out, x, lines, tiles, weight, panel, following, 0, 0, weight.in_features, address
            )
        turn = next_turn


@jit
def fit_the_cache(num_rows, num_inputs):
    """Return True if all of x stays in an L2 cache while panels are processed."""
    return num_rows <= BLOCK_ROWS and num_rows * num_inputs <= BLOCK_ROWS * BLOCK_INPUTS


@jit(allocates=True)
def _multiply_share(thread, num_threads, counter, out, x, lines, num_rows, weight):
    """One thread's part of a matmul that divides panels, not rows, among threads.

    `lines` of address 0 means that x is not in lines yet. Threads take panels dynamically if x fits their L2
    caches; otherwise shares are fixed.
    """
    num_panels = num_panels_of(weight)
    first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
    is_copied = lines.rows == 0 and num_rows >= LINED_ROWS and last - first >= LINED_PANELS
    memory = np.empty(THREAD_BYTES + (_LINED_BYTES if is_copied else 0) + VECTOR, np.uint8)
    if fit_the_cache(num_rows, weight.in_features):
        per_turn = panels_per_turn(num_panels, num_threads)
        _take_panels(line_in(counter), per_turn, out, x, lines, num_rows, weight, is_copied, memory)
    else:
        _multiply_blocks(first, last, out, x, lines, num_rows, weight, is_copied, memory)


@jit
def _multiply_part(
    thread, num_threads, counter, out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features
):  # fmt: skip
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    source, target = Strided(x, F32 * x_stride), Strided(out, F32 * out_features)
    _multiply_share(thread, num_threads, counter, target, source, Lined(0, 0), num_rows, weight)


@jit
def _multiply_lined_part(
    thread, num_threads, counter, out, lines, packed, weight_format, bias, num_rows, out_features, in_features
):
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    source, target = Lined(lines, in_features // LANES), Strided(out, F32 * out_features)
    _multiply_share(thread, num_threads, counter, target, Strided(0, 0), source, num_rows, weight)


@jit
def _multiply_taken_rows(
    thread, counter, bounds, out, x, x_stride, packed, weight_format, bias, out_features, in_features
):
    weight = Weight(packed, weight_format, bias, out_features, in_features)
    source, target = Strided(x, F32 * x_stride), Strided(out, F32 * out_features)
    address = line_in(counter)
    block = take(address)
    while block < len(bounds) - 1:
        low, high = bounds[block], bounds[block + 1]
        multiply_rows(skip_rows(target, low), skip_rows(source, low), high - low, weight)
        block = take(address)


@external(allocates=True)
def multiply_parallel(
    out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
):
    """Multiply on several threads. Strides count values."""
    counter = new_counter()
    # Rows are distributed if every thread gets a block of them: weight traffic is the same, and each row of x
    # is copied by only one thread.
    if are_rows_taken(num_rows, num_threads):
        bounds = plan_blocks(num_rows, num_threads)
        rows = (counter, bounds, out, x, x_stride, packed, weight_format, bias, out_features, in_features)
        launch(_multiply_taken_rows, num_threads, rows)
        return
    arguments = (
        num_threads, counter, out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features,
    )  # fmt: skip
    launch(_multiply_part, num_threads, arguments)


@jit(allocates=True)
def multiply_lined_parallel(
    out, lines, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
):
    """`multiply_parallel` for an x of complete lines stored in lines; threads divide panels, not rows."""
    arguments = (
        num_threads, new_counter(), out, lines, packed, weight_format, bias, num_rows, out_features, in_features,
    )  # fmt: skip
    launch(_multiply_lined_part, num_threads, arguments)
