"""Products with a weight matrix that is packed once, in fp32: y = x W^T + b.

Weights lie in panels of 32 output channels, input by input, so that a tile of the result (some rows by 32 channels)
stays in registers while its panel passes by in one contiguous stream. Every number of the result is one chain of
fused multiply-adds over the inputs in their order: it depends on its row and its channel alone, to the last bit,
whatever the number of rows or threads.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels import cpu_vector as vector
from kernels.cpu_jit import f32_pointer, jit, use_torch_threads
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL, multiply_lined_tile, multiply_tile
from kernels.cpu_memory import advise_huge_pages
from kernels.cpu_row import F32, VECTOR, address_of
from kernels.cpu_vector import LANES

# So much of x stays in the second-level cache while all panels pass by.
BLOCK_ROWS, BLOCK_INPUTS = 140, 768
# With so many rows for so many panels, x is copied into lines first (`multiply_lined_tile`).
LINED_ROWS, LINED_PANELS = 28, 12


def is_supported() -> bool:
    """Whether this CPU has the registers that the tiles are cut for."""
    return torch.backends.cpu.get_cpu_capability() == "AVX512"


def pack(weight: torch.Tensor) -> torch.Tensor:
    """[num_panels, in_features, PANEL] of a weight [out_features, in_features]; the last panel ends in zeros."""
    out_features, in_features = weight.shape
    num_panels = -(-out_features // PANEL)
    packed = torch.empty(num_panels, in_features, PANEL)
    advise_huge_pages(packed)
    packed[-1] = 0.0
    whole = out_features // PANEL
    packed[:whole] = weight[: whole * PANEL].view(whole, PANEL, in_features).transpose(1, 2)
    if whole < num_panels:
        packed[-1, :, : out_features - whole * PANEL] = weight[whole * PANEL :].t()
    return packed


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times `pack`ed weights, plus bias [num_panels * PANEL]; fresh and contiguous."""
    assert x.dtype is torch.float32
    assert x.stride(1) == 1
    out = torch.empty((len(x), out_features))
    if len(x) == 0:
        return out
    multiply_parallel(
        out.data_ptr(),
        x.data_ptr(),
        x.stride(0),
        packed.data_ptr(),
        bias.data_ptr(),
        len(x),
        out_features,
        packed.shape[1],
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
def _multiply_panel(
    out, out_stride, x, x_stride, lined, panel, start, start_stride, num_rows, depth, rest_of_panel
):
    """PANEL channels of every row, over `depth` inputs; strides in bytes. `lined` is x in lines, or 0.

    The tiles fetch a share each of the weights that come next: memory works while the registers do.
    """
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    num_lines = depth // LANES if lined else 0
    done = num_lines * LANES
    next_weights = panel + F32 * PANEL * depth + rest_of_panel
    for tile in range(num_tiles):
        first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        to, origin, origin_stride = out + first * out_stride, start + first * start_stride, start_stride
        ahead, step = next_weights + F32 * PANEL * depth * tile // num_tiles, F32 * PANEL // num_tiles
        if num_lines:
            lines = lined + VECTOR * num_lines * first
            multiply_lined_tile(
                last - first, to, out_stride, lines, panel, origin, origin_stride, num_lines, ahead, step
            )
            origin, origin_stride = to, out_stride
        if done < depth:
            multiply_tile(
                last - first,
                to,
                out_stride,
                x + first * x_stride + F32 * done,
                x_stride,
                panel + F32 * PANEL * done,
                origin,
                origin_stride,
                depth - done,
                ahead + done * step,
                step,
            )


@jit
def _multiply_block(
    out,
    x,
    x_stride,
    packed,
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
            packed + F32 * PANEL * (panel * in_features + begin),
            start,
            start_stride,
            num_rows,
            end - begin,
            F32 * PANEL * (in_features - (end - begin)),
        )
        if width < PANEL and end == in_features:
            for row in range(num_rows):
                for i in range(width):
                    f32_pointer(out)[row * out_features + channel + i] = f32_pointer(scratch)[row * PANEL + i]


@jit
def _multiply_panels(first, last, out, x, x_stride, packed, bias, num_rows, out_features, in_features):
    scratch = np.empty((BLOCK_ROWS, PANEL), np.float32)
    is_lined = num_rows >= LINED_ROWS and last - first >= LINED_PANELS
    lined = np.empty((BLOCK_ROWS * BLOCK_INPUTS + LANES) if is_lined else 0, np.float32)
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    num_parts = (in_features + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    for block in range(num_blocks):
        low, high = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        for part in range(num_parts):
            # Asked for in the loop: an array lives until its last use, and an address is none.
            lines = (address_of(lined) + VECTOR - 1) // VECTOR * VECTOR if is_lined else 0
            _multiply_block(
                out + F32 * low * out_features,
                x + F32 * low * x_stride,
                F32 * x_stride,
                packed,
                bias,
                first,
                last,
                high - low,
                out_features,
                in_features,
                in_features * part // num_parts,
                in_features * (part + 1) // num_parts,
                address_of(scratch),
                lines,
            )


@jit(parallel=True)
def multiply_parallel(out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads):
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
            bias,
            high - low,
            out_features,
            in_features,
        )
