"""Products with a weight matrix that is packed once, in fp32: y = x W^T + b.

Weights lie in panels of 32 output channels, input by input, so that a tile of the result (some rows by 32 channels)
stays in registers while its panel passes by in one contiguous stream. Every number of the result is one chain of
fused multiply-adds over the inputs in their order: it depends on its row and its channel alone, to the last bit,
whatever the number of rows or threads.

A panel passes by in pieces that the first-level cache holds: where weights are kept in fewer than 32 bits
(`cpu_weight_packing`), a piece is expanded once for all rows of a block.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels import cpu_vector as vector
from kernels.cpu_jit import compiles_for, f32_pointer, jit, use_torch_threads
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL, multiply_lined_tile, multiply_tile
from kernels.cpu_row import F32, VECTOR, line_in
from kernels.cpu_vector import LANES
from kernels.cpu_weight_formats import FLOAT32, GROUP, ROW, expand, panel_bytes
from kernels.cpu_weight_packing import PackedWeight

# So much of x stays in the second-level cache while all panels pass by.
BLOCK_ROWS, BLOCK_INPUTS = 140, 768
# So much of a panel stays in the first-level cache while all rows of a block pass by.
PIECE_INPUTS = 96
# With so many rows for so many panels, x is copied into lines first (`multiply_lined_tile`).
LINED_ROWS, LINED_PANELS = 28, 6


def is_supported() -> bool:
    """Whether this CPU has the registers that the tiles are cut for."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512" and compiles_for("avx512f")


def multiply(x: torch.Tensor, weight: PackedWeight, bias: torch.Tensor) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times the weight, plus bias [num_panels * PANEL]; fresh and contiguous."""
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


@jit
def _line_up(lined, x, x_stride, num_rows, num_lines):
    """Copy x [num_rows, num_lines * LANES] tile by tile, each as `multiply_lined_tile` takes it."""
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    for tile in range(num_tiles):
        first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        target = lined + VECTOR * num_lines * first
        for row in range(first, last):
            for line in range(num_lines):
                to = target + VECTOR * ((last - first) * line + row - first)
                vector.store(to, vector.load(x + row * x_stride + VECTOR * line))


@jit
def _multiply_piece(
    out,
    out_stride,
    x,
    x_stride,
    lined,
    num_lines,
    weights,
    start,
    start_stride,
    num_rows,
    begin,
    end,
    ahead,
    ahead_step,
):
    """PANEL channels of every row, over the inputs begin .. end - 1; strides in bytes.

    `lined` is x in lines, `num_lines` of each row, or 0. The tiles fetch a share each of what is at `ahead`,
    `ahead_step` bytes for every input of the piece: memory works while the registers do.
    """
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    in_lines = (end - begin) // LANES * LANES if num_lines else 0
    step = ahead_step // num_tiles
    for tile in range(num_tiles):
        first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        to, origin, origin_stride = out + first * out_stride, start + first * start_stride, start_stride
        fetched = ahead + (end - begin) * step * tile
        if in_lines:
            lines = lined + VECTOR * (num_lines * first + begin // LANES * (last - first))
            multiply_lined_tile(
                last - first,
                to,
                out_stride,
                VECTOR,
                origin,
                origin_stride,
                VECTOR,
                lines,
                weights,
                in_lines // LANES,
                fetched,
                step,
            )
            origin, origin_stride = to, out_stride
        if in_lines < end - begin:
            multiply_tile(
                last - first,
                to,
                out_stride,
                x + first * x_stride + F32 * (begin + in_lines),
                x_stride,
                weights + ROW * in_lines,
                origin,
                origin_stride,
                end - begin - in_lines,
                fetched + in_lines * step,
                step,
            )


@jit
def _multiply_panel(
    out,
    out_stride,
    x,
    x_stride,
    lined,
    panel,
    weight_format,
    in_features,
    start,
    start_stride,
    num_rows,
    begin,
    end,
    expanded,
    sums,
):
    """PANEL channels of every row, over the inputs begin .. end - 1 of all `in_features`, from `x` and `lined` on.

    Between the pieces results wait in `sums` [num_rows, PANEL]: rows of `out` may lie so that they fall on the same
    lines of the cache.
    """
    num_lines = (end - begin) // LANES if lined else 0
    size = panel_bytes(weight_format, in_features)
    # What comes after a piece, its last one excepted, is the next piece of the panel, or of the next panel.
    ahead_step = size // in_features
    for low in range(begin, end, PIECE_INPUTS):
        high = min(low + PIECE_INPUTS, end)
        weights = panel + ROW * low
        if weight_format != FLOAT32:
            weights = expanded
            expand(weight_format, panel, low, high, expanded)
        after = high if high < end else in_features + begin
        to, to_stride = (out, out_stride) if high == end else (sums, ROW)
        _multiply_piece(
            to, to_stride, x, x_stride, lined, num_lines, weights, start, start_stride, num_rows, low - begin,
            high - begin, panel + ahead_step * after, ahead_step,
        )  # fmt: skip
        start, start_stride = sums, ROW


@jit
def _multiply_block(
    out,
    x,
    x_stride,
    packed,
    weight_format,
    bias,
    first,
    last,
    num_rows,
    out_features,
    in_features,
    begin,
    end,
    scratch,
    lined,
    expanded,
    sums,
):
    """Panels first .. last - 1 over the inputs begin .. end - 1, adding to what `out` holds from those before."""
    if lined:
        _line_up(lined, x + F32 * begin, x_stride, num_rows, (end - begin) // LANES)
    for panel in range(first, last):
        channel = panel * PANEL
        width = min(PANEL, out_features - channel)
        target, stride = out + F32 * channel, F32 * out_features
        start, start_stride = (bias + F32 * channel, 0) if begin == 0 else (target, stride)
        if width < PANEL:  # the last panel: beside the real channels there is no room in `out`
            target, stride = scratch, F32 * PANEL
            start, start_stride = (bias + F32 * channel, 0) if begin == 0 else (target, stride)
        _multiply_panel(
            target,
            stride,
            x + F32 * begin,
            x_stride,
            lined,
            packed + panel_bytes(weight_format, in_features) * panel,
            weight_format,
            in_features,
            start,
            start_stride,
            num_rows,
            begin,
            end,
            expanded,
            sums,
        )
        if width < PANEL and end == in_features:
            for row in range(num_rows):
                for i in range(width):
                    f32_pointer(out)[row * out_features + channel + i] = f32_pointer(scratch)[row * PANEL + i]


@jit
def _part_begin(part, num_parts, in_features):
    return in_features if part == num_parts else in_features // GROUP * part // num_parts * GROUP


@jit
def _multiply_panels(
    first, last, out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features
):
    scratch = np.empty(BLOCK_ROWS * PANEL + LANES, np.float32)
    sums = np.empty(BLOCK_ROWS * PANEL + LANES, np.float32)
    piece = np.empty(PIECE_INPUTS * PANEL + LANES, np.float32)
    is_lined = num_rows >= LINED_ROWS and last - first >= LINED_PANELS
    lined = np.empty((BLOCK_ROWS * (BLOCK_INPUTS + GROUP) + LANES) if is_lined else 0, np.float32)
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    num_parts = (in_features + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    for block in range(num_blocks):
        low, high = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        for part in range(num_parts):
            # Asked for in the loop: an array lives until its last use, and an address is none.
            lines = line_in(lined) if is_lined else 0
            _multiply_block(
                out + F32 * low * out_features,
                x + F32 * low * x_stride,
                F32 * x_stride,
                packed,
                weight_format,
                bias,
                first,
                last,
                high - low,
                out_features,
                in_features,
                _part_begin(part, num_parts, in_features),
                _part_begin(part + 1, num_parts, in_features),
                line_in(scratch),
                lines,
                line_in(piece),
                line_in(sums),
            )


@jit(parallel=True)
def multiply_parallel(
    out, x, x_stride, packed, weight_format, bias, num_rows, out_features, in_features, num_threads
):
    num_panels = (out_features + PANEL - 1) // PANEL
    # Rows are shared out where each thread then has a block of them: as many weights pass by, and each row of x is
    # copied by one thread alone.
    by_rows = num_rows > BLOCK_ROWS * (num_threads - 1)
    for thread in prange(num_threads):
        low, high = 0, num_rows
        first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
        if by_rows:
            low, high = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
            first, last = 0, num_panels
        _multiply_panels(
            first,
            last,
            out + F32 * low * out_features,
            x + F32 * low * x_stride,
            x_stride,
            packed,
            weight_format,
            bias,
            high - low,
            out_features,
            in_features,
        )
