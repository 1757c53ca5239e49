"""Products with a weight matrix that is packed once, in fp32: y = x W^T + b.

Weights lie in panels of 32 output channels, input by input, so that a tile of the result (some rows by 32 channels)
stays in registers while its panel passes by in one contiguous stream. Every number of the result is one chain of
fused multiply-adds over the inputs in their order: it depends on its row and its channel alone, to the last bit,
whatever the number of rows or threads.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels.cpu_jit import f32_pointer, jit, prefetch_line, use_torch_threads
from kernels.cpu_memory import advise_huge_pages
from kernels.cpu_row import F32, VECTOR, address_of
from kernels.cpu_vector import F32X16, LANES, call

PANEL = 2 * LANES  # output channels
# So much of x stays in the second-level cache while all panels pass by.
BLOCK_ROWS, BLOCK_INPUTS = 140, 768
MOST_ROWS = 14  # 28 sums, 2 vectors of weights and a number of x fill the 32 registers of AVX-512

_ir = cgutils.ir


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


def _tile(num_rows: int) -> Any:
    """An intrinsic: out[r, 0..PANEL) = start[r] + x[r] @ panel for `num_rows` rows; strides in bytes.

    With every input it asks for the cache line at `ahead`, `ahead_step` bytes further each time.
    """

    def tile(
        typing_context: Any,
        out: Any,
        out_stride: Any,
        x: Any,
        x_stride: Any,
        panel: Any,
        start: Any,
        start_stride: Any,
        depth: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            to, to_stride, at, at_stride, weights, start, start_stride, count, ahead, ahead_step = arguments
            int64 = to.type

            def vector(address: Any) -> Any:
                return builder.inttoptr(address, F32X16.as_pointer())

            def offset(address: Any, by: Any) -> Any:
                return builder.add(address, by)

            halves = (int64(0), int64(VECTOR))
            firsts = [offset(start, builder.mul(start_stride, int64(r))) for r in range(num_rows)]
            sums = [
                [
                    cgutils.alloca_once_value(builder, builder.load(vector(offset(first, half)), align=4))
                    for half in halves
                ]
                for first in firsts
            ]
            rows = [offset(at, builder.mul(at_stride, int64(r))) for r in range(num_rows)]
            with cgutils.for_range(builder, count, intp=int64) as loop:
                source = offset(weights, builder.mul(loop.index, int64(2 * VECTOR)))
                numbers = [builder.load(vector(offset(source, half)), align=4) for half in halves]
                prefetch_line(builder, offset(ahead, builder.mul(loop.index, ahead_step)))
                distance = builder.mul(loop.index, int64(F32))
                for r in range(num_rows):
                    pointer = builder.inttoptr(offset(rows[r], distance), _ir.FloatType().as_pointer())
                    one = builder.insert_element(
                        _ir.Constant(F32X16, _ir.Undefined),
                        builder.load(pointer, align=4),
                        _ir.IntType(32)(0),
                    )
                    lanes = _ir.Constant(_ir.VectorType(_ir.IntType(32), LANES), [0] * LANES)
                    factor = builder.shuffle_vector(one, one, lanes)
                    for half, total in enumerate(sums[r]):
                        operands = [factor, numbers[half], builder.load(total)]
                        builder.store(call(builder, "llvm.fma.v16f32", F32X16, operands), total)
            for r in range(num_rows):
                target = offset(to, builder.mul(to_stride, int64(r)))
                for half, total in zip(halves, sums[r], strict=True):
                    builder.store(builder.load(total), vector(offset(target, half)), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), generate

    return intrinsic(tile)


_tile_1, _tile_2, _tile_3, _tile_4, _tile_5, _tile_6, _tile_7 = (_tile(n) for n in range(1, 8))
_tile_8, _tile_9, _tile_10, _tile_11, _tile_12, _tile_13, _tile_14 = (_tile(n) for n in range(8, 15))


@jit
def _multiply_tile(num_rows, out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step):
    if num_rows == 14:
        _tile_14(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 13:
        _tile_13(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 12:
        _tile_12(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 11:
        _tile_11(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 10:
        _tile_10(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 9:
        _tile_9(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 8:
        _tile_8(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 7:
        _tile_7(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 6:
        _tile_6(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 5:
        _tile_5(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 4:
        _tile_4(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 3:
        _tile_3(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    elif num_rows == 2:
        _tile_2(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)
    else:
        _tile_1(out, out_stride, x, x_stride, panel, start, start_stride, depth, ahead, step)


@jit
def _multiply_panel(out, out_stride, x, x_stride, panel, start, start_stride, num_rows, depth, rest_of_panel):
    """PANEL channels of every row, over `depth` inputs; strides in bytes.

    The tiles fetch a share each of the weights that come next: memory works while the registers do.
    """
    num_tiles = (num_rows + MOST_ROWS - 1) // MOST_ROWS
    next_weights = panel + F32 * PANEL * depth + rest_of_panel
    for tile in range(num_tiles):
        first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        _multiply_tile(
            last - first,
            out + first * out_stride,
            out_stride,
            x + first * x_stride,
            x_stride,
            panel,
            start + first * start_stride,
            start_stride,
            depth,
            next_weights + F32 * PANEL * depth * tile // num_tiles,
            F32 * PANEL // num_tiles,
        )


@jit
def _multiply_block(
    out, x, x_stride, packed, bias, first, last, num_rows, out_features, in_features, begin, end, scratch
):
    """Panels first .. last - 1 over the inputs begin .. end - 1, adding to what `out` holds from those before."""
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
    num_blocks = (num_rows + BLOCK_ROWS - 1) // BLOCK_ROWS
    num_parts = (in_features + BLOCK_INPUTS - 1) // BLOCK_INPUTS
    for block in range(num_blocks):
        low, high = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        for part in range(num_parts):
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
            )


@jit(parallel=True)
def multiply_parallel(out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads):
    num_panels = (out_features + PANEL - 1) // PANEL
    for thread in prange(num_threads):
        _multiply_panels(
            num_panels * thread // num_threads,
            num_panels * (thread + 1) // num_threads,
            out,
            x,
            x_stride,
            packed,
            bias,
            num_rows,
            out_features,
            in_features,
        )
