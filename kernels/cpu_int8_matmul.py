"""Products with a weight matrix of 8-bit integers, packed once: y = x W^T + b, with x quantised as it arrives.

What is computed is defined in `kernels.grouped_int8`: sums within a group of inputs are integers, hence exact, and
over the groups each number of the result is one chain of fp32 multiply-adds in the groups' order. So it depends on
its row and its channel alone, to the last bit, whatever the number of rows or threads and whatever the CPU.
"""

from __future__ import annotations

from functools import cache

import numpy as np
import torch
from numba import prange

from kernels import cpu_vector as vector
from kernels import grouped_int8
from kernels.cpu_int8_rows import first_row, num_tiles_of, quantise_rows
from kernels.cpu_int8_tile import (
    PANEL_BYTES,
    QUAD,
    QUADS,
    ROW_BYTES,
    WEIGHT_BYTES,
    ZERO_POINT,
    multiply_tile,
)
from kernels.cpu_jit import NUMBERS_PER_THREAD, f32_pointer, jit, use_torch_threads
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL
from kernels.cpu_memory import advise_huge_pages
from kernels.cpu_row import F32, VECTOR, line_in
from kernels.cpu_vector import LANES
from kernels.grouped_int8 import GROUP

# So much of x stays in the second-level cache while all panels pass by.
_BLOCK_BYTES, _BLOCK_TILES = 1 << 19, 10
# So much of a panel stays in the first-level cache while all tiles of a block pass by.
_PIECE_GROUPS = 9
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
def _multiply_panel(out, out_stride, width, rows, panel, bias, sums, low, high, num_rows, num_groups):
    """`width` channels of the tiles low .. high - 1; strides in bytes. `sums` is the address of [any, PANEL].

    A panel passes by in pieces that the first-level cache holds. The tiles fetch a share each of what comes next:
    memory works while the registers do.
    """
    begin, end = first_row(low, num_rows), first_row(high, num_rows)
    start0, start1 = vector.load(bias), vector.load(bias + VECTOR)
    for r in range(end - begin):
        vector.store(sums + 2 * VECTOR * r, start0)
        vector.store(sums + 2 * VECTOR * r + VECTOR, start1)
    for group in range(0, num_groups, _PIECE_GROUPS):
        count = min(_PIECE_GROUPS, num_groups - group)
        piece, size = panel + PANEL_BYTES * group, PANEL_BYTES * count
        for tile in range(low, high):
            first, last = first_row(tile, num_rows), first_row(tile + 1, num_rows)
            multiply_tile(
                last - first,
                sums + 2 * VECTOR * (first - begin),
                rows + ROW_BYTES * (num_groups * first + (last - first) * group),
                piece,
                count,
                piece + size + size * (tile - low) // (high - low),
                PANEL * QUAD // (high - low),
            )
    for r in range(end - begin):
        source, target = sums + 2 * VECTOR * r, out + (begin + r) * out_stride
        if width == PANEL:
            vector.store(target, vector.load(source))
            vector.store(target + VECTOR, vector.load(source + VECTOR))
        else:
            for i in range(width):
                f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def _multiply_panels(first, last, out, rows, packed, bias, num_rows, out_features, num_groups):
    """Panels first .. last - 1 of every row."""
    num_tiles = num_tiles_of(num_rows)
    by_bytes = (ROW_BYTES * num_groups * num_rows + _BLOCK_BYTES - 1) // _BLOCK_BYTES
    by_tiles = (num_tiles + _BLOCK_TILES - 1) // _BLOCK_TILES
    num_blocks = min(num_tiles, max(by_bytes, by_tiles))
    sums = np.empty((num_tiles // num_blocks + 1) * MOST_ROWS * PANEL + LANES, np.float32)
    for block in range(num_blocks):
        low, high = num_tiles * block // num_blocks, num_tiles * (block + 1) // num_blocks
        for panel in range(first, last):
            channel = panel * PANEL
            _multiply_panel(
                out + F32 * channel,
                F32 * out_features,
                min(PANEL, out_features - channel),
                rows,
                packed + panel * PANEL_BYTES * num_groups,
                bias + F32 * channel,
                line_in(sums),
                low,
                high,
                num_rows,
                num_groups,
            )


@jit(exact=True)
def _quantise_part(first, last, num_rows, x, x_stride, workspace, in_features):
    quantise_rows(first, last, num_rows, x, x_stride, line_in(workspace), in_features)


@jit
def _multiply_part(first, last, out, workspace, packed, bias, num_rows, out_features, num_groups):
    _multiply_panels(first, last, out, line_in(workspace), packed, bias, num_rows, out_features, num_groups)


@jit
def _multiply_rows(first, last, out, x, x_stride, packed, bias, out_features, in_features):
    """All channels of the rows first .. last - 1, quantised here."""
    count, num_groups = last - first, (in_features + GROUP - 1) // GROUP
    workspace = np.empty(count * num_groups * ROW_BYTES + VECTOR, np.uint8)
    _quantise_part(0, count, count, x + F32 * first * x_stride, x_stride, workspace, in_features)
    target, num_panels = out + F32 * first * out_features, (out_features + PANEL - 1) // PANEL
    _multiply_part(0, num_panels, target, workspace, packed, bias, count, out_features, num_groups)


@jit
def _quantise(workspace, x, x_stride, num_rows, in_features, num_threads):
    if num_rows * in_features < 2 * NUMBERS_PER_THREAD or num_threads == 1:
        _quantise_part(0, num_rows, num_rows, x, x_stride, workspace, in_features)
    else:
        _quantise_parallel(workspace, x, x_stride, num_rows, in_features, num_threads)


@jit(parallel=True)
def _quantise_parallel(workspace, x, x_stride, num_rows, in_features, num_threads):
    for thread in prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        _quantise_part(first, last, num_rows, x, x_stride, workspace, in_features)


@jit(parallel=True)
def multiply_parallel(out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads):
    """Takes what `cpu_matmul.multiply_parallel` takes; x is quantised here."""
    # As there: rows are shared out where each thread then has a block of them. No thread waits for another's.
    if num_rows > _BLOCK_TILES * MOST_ROWS * (num_threads - 1):
        for thread in prange(num_threads):
            first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
            _multiply_rows(first, last, out, x, x_stride, packed, bias, out_features, in_features)
        return
    num_panels = (out_features + PANEL - 1) // PANEL
    num_groups = (in_features + GROUP - 1) // GROUP
    workspace = np.empty(num_rows * num_groups * ROW_BYTES + VECTOR, np.uint8)
    _quantise(workspace, x, x_stride, num_rows, in_features, num_threads)
    for thread in prange(num_threads):
        first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
        _multiply_part(first, last, out, workspace, packed, bias, num_rows, out_features, num_groups)
