"""Products with a weight matrix of 8-bit integers, packed once: y = x W^T + b, with x quantised as it arrives.

What is computed is defined in `kernels.grouped_int8`: sums within a group of inputs are integers, hence exact, and
over the groups each number of the result is one chain of fp32 multiply-adds in the groups' order. So it depends on
its row and its channel alone, to the last bit, whatever the number of rows or threads and whatever the CPU.

AVX-512 VNNI multiplies unsigned by signed bytes. Weights are the unsigned ones, 128 too large, which adds 128 times
the sum of the row's group to every channel alike: sums start from that number with its sign turned.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import torch
from numba import prange, types
from numba.core import cgutils
from numba.extending import intrinsic

from kernels import cpu_vector as vector
from kernels import grouped_int8
from kernels.cpu_jit import (
    NUMBERS_PER_THREAD,
    compiles_for,
    f32_pointer,
    jit,
    prefetch_line,
    use_torch_threads,
)
from kernels.cpu_memory import advise_huge_pages
from kernels.cpu_row import F32, I32, VECTOR, address_of, line_in
from kernels.cpu_vector import F32X16, LANES, call
from kernels.grouped_int8 import GROUP, LIMIT
from kernels.layer_cache import SMALLEST_PEAK

PANEL = 2 * LANES  # output channels
ZERO_POINT = 128  # the byte of a weight of 0

_QUAD = 4  # inputs that one instruction adds up
_QUADS = GROUP // _QUAD
# A panel's part of a group: the weights, quad by quad and then channel by channel; then the channels' scales.
_WEIGHT_BYTES = PANEL * GROUP
_PANEL_BYTES = _WEIGHT_BYTES + PANEL * F32
# A row's part of a group: the numbers, their scale, and what the channels' sums start from.
_ROW_BYTES = GROUP + F32 + I32
_MOST_ROWS = 14  # 28 sums, 2 vectors of weights and a quad of x fill the 32 registers of AVX-512
# So many bytes of x stay in the second-level cache while all panels pass by.
_BLOCK_BYTES = 1 << 19
_PACKED_AT_ONCE = 1 << 22  # weights: packing makes several copies of them

_ir = cgutils.ir
_I8, _I32, _F32 = _ir.IntType(8), _ir.IntType(32), _ir.FloatType()
_I8X16, _I32X16 = _ir.VectorType(_I8, LANES), _ir.VectorType(_I32, LANES)
_INFINITY_BITS = 0x7F800000


def has_byte_products() -> bool:
    """Whether kernels are compiled for a CPU that multiplies bytes (AVX-512 VNNI); elsewhere they are slower."""
    return compiles_for("avx512vnni")


def pack(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [num_panels, num_groups, bytes] of a weight [out_features, in_features], ends filled up with zeros."""
    out_features, in_features = weight.shape
    num_panels, num_groups = -(-out_features // PANEL), grouped_int8.num_groups(in_features)
    packed = torch.empty(num_panels, num_groups, _PANEL_BYTES, dtype=torch.uint8)
    advise_huge_pages(packed)
    at_once = max(1, _PACKED_AT_ONCE // (PANEL * in_features))
    for first in range(0, num_panels, at_once):
        channels = weight[first * PANEL : (first + at_once) * PANEL]
        numbers, scales = grouped_int8.quantise(
            torch.nn.functional.pad(channels, (0, 0, 0, -len(channels) % PANEL))
        )
        target = packed[first : first + at_once]
        quads = (numbers.to(torch.int16) + ZERO_POINT).to(torch.uint8)
        quads = quads.view(-1, PANEL, num_groups, _QUADS, _QUAD).permute(0, 2, 3, 1, 4)
        target[:, :, :_WEIGHT_BYTES] = quads.reshape(-1, num_groups, _WEIGHT_BYTES)
        scales = scales.view(-1, PANEL, num_groups).transpose(1, 2).contiguous()
        target[:, :, _WEIGHT_BYTES:] = scales.view(torch.uint8).view(-1, num_groups, PANEL * F32)
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


def quantise_rows(x: torch.Tensor) -> torch.Tensor:
    """uint8 [num_rows, bytes], x [num_rows, in_features] fp32 as the tiles read it: for tests of a tile alone."""
    num_rows, in_features = x.shape
    rows = torch.empty(num_rows, grouped_int8.num_groups(in_features) * _ROW_BYTES, dtype=torch.uint8)
    _quantise_rows(0, num_rows, x.data_ptr(), x.stride(0), rows.data_ptr(), in_features)
    return rows


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from the disk, so that no step pays for it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL), 1)


def _splat(builder: Any, value: Any) -> Any:
    kind = _ir.VectorType(value.type, LANES)
    one = builder.insert_element(_ir.Constant(kind, _ir.Undefined), value, _I32(0))
    return builder.shuffle_vector(one, one, _ir.Constant(_I32X16, [0] * LANES))


def _constant(kind: Any, value: float) -> Any:
    return _ir.Constant(kind, [value] * LANES)


@intrinsic
def _quantise_group(typing_context: Any, source: Any, target: Any) -> Any:
    """GROUP floats at `source` as a row's part of a group at `target`."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, target = arguments
        int64 = source.type

        def pointer(base: Any, distance: int, kind: Any) -> Any:
            return builder.inttoptr(builder.add(base, int64(distance)), kind.as_pointer())

        numbers = [builder.load(pointer(source, at, F32X16), align=4) for at in range(0, F32 * GROUP, VECTOR)]
        # As integers, sizes are in the order of the floats, with infinity and NaN above all.
        largest = _constant(_I32X16, 0)
        for number in numbers:
            size = builder.and_(builder.bitcast(number, _I32X16), _constant(_I32X16, 0x7FFFFFFF))
            largest = builder.select(builder.icmp_signed(">", size, largest), size, largest)
        bits = call(builder, "llvm.vector.reduce.smax.v16i32", _I32, [largest])
        is_finite = builder.icmp_signed("<", bits, _I32(_INFINITY_BITS))
        peak, smallest = builder.bitcast(bits, _F32), _F32(np.float32(SMALLEST_PEAK))
        peak = builder.select(builder.fcmp_ordered(">", peak, smallest), peak, smallest)
        factors = _splat(builder, builder.fdiv(_F32(LIMIT), peak))
        are_finite = _splat(builder, is_finite)
        total = _constant(_I32X16, 0)
        for index, number in enumerate(numbers):
            scaled = builder.select(are_finite, builder.fmul(number, factors), _constant(F32X16, 0.0))
            whole = builder.fptosi(call(builder, "llvm.rint.v16f32", F32X16, [scaled]), _I32X16)
            total = builder.add(total, whole)
            builder.store(builder.trunc(whole, _I8X16), pointer(target, LANES * index, _I8X16), align=_QUAD)
        scale = builder.select(is_finite, builder.fdiv(peak, _F32(LIMIT)), _F32(float("nan")))
        builder.store(scale, pointer(target, GROUP, _F32), align=4)
        total = call(builder, "llvm.vector.reduce.add.v16i32", _I32, [total])
        builder.store(builder.mul(total, _I32(-ZERO_POINT)), pointer(target, GROUP + F32, _I32), align=4)
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), generate


@jit(exact=True)
def _quantise_rows(first, last, x, x_stride, rows, in_features):
    """Rows first .. last - 1 of x, stride in numbers, as parts of groups one after the other at `rows`."""
    num_groups = (in_features + GROUP - 1) // GROUP
    whole = in_features // GROUP
    rest = np.zeros(GROUP, np.float32)
    for row in range(first, last):
        source = x + F32 * row * x_stride
        target = rows + row * num_groups * _ROW_BYTES
        for group in range(whole):
            _quantise_group(source + F32 * GROUP * group, target + _ROW_BYTES * group)
        if whole < num_groups:
            for i in range(in_features - whole * GROUP):
                rest[i] = f32_pointer(source)[whole * GROUP + i]
            _quantise_group(address_of(rest), target + _ROW_BYTES * whole)


def multiply_bytes(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """sums + the products of each lane's four unsigned with its four signed bytes, by VNNI."""
    return call(builder, "llvm.x86.avx512.vpdpbusd.512", _I32X16, [sums, weights, numbers])


def multiply_parts(builder: Any, sums: Any, weights: Any, numbers: Any) -> Any:
    """The same on any CPU."""
    for quarter in range(0, 32, 8):
        weight = builder.lshr(builder.shl(weights, _constant(_I32X16, 24 - quarter)), _constant(_I32X16, 24))
        number = builder.ashr(builder.shl(numbers, _constant(_I32X16, 24 - quarter)), _constant(_I32X16, 24))
        sums = builder.add(sums, builder.mul(weight, number))
    return sums


def make_tile(num_rows: int, multiply_quads: Any) -> Any:
    """An intrinsic: sums[r, 0..PANEL) += rows[r] @ panel for `num_rows` rows; strides in bytes.

    With every quad of inputs it asks for the cache line at `ahead`, `ahead_step` bytes further each time.
    """

    def tile(
        typing_context: Any,
        sums: Any,
        rows: Any,
        row_stride: Any,
        panel: Any,
        num_groups: Any,
        ahead: Any,
        ahead_step: Any,
    ) -> Any:
        def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
            sums, rows, row_stride, panel, num_groups, ahead, ahead_step = arguments
            int64 = sums.type

            def load(kind: Any, address: Any, distance: int = 0) -> Any:
                at = builder.inttoptr(builder.add(address, int64(distance)), kind.as_pointer())
                return builder.load(at, align=4)

            halves = (0, VECTOR)
            starts = [builder.add(rows, builder.mul(row_stride, int64(r))) for r in range(num_rows)]
            totals = [[cgutils.alloca_once(builder, _I32X16) for _ in halves] for _ in starts]
            with cgutils.for_range(builder, num_groups, intp=int64) as groups:
                of_row = builder.mul(groups.index, int64(_ROW_BYTES))
                weights = builder.add(panel, builder.mul(groups.index, int64(_PANEL_BYTES)))
                first_quad = builder.mul(groups.index, int64(_QUADS))
                parts = [builder.add(start, of_row) for start in starts]
                for part, row_totals in zip(parts, totals, strict=True):
                    for total in row_totals:
                        builder.store(_splat(builder, load(_I32, part, GROUP + F32)), total)
                with cgutils.for_range(builder, int64(_QUADS), intp=int64) as quads:
                    quad = builder.add(weights, builder.mul(quads.index, int64(PANEL * _QUAD)))
                    vectors = [load(_I32X16, quad, half) for half in halves]
                    distance = builder.mul(builder.add(first_quad, quads.index), ahead_step)
                    prefetch_line(builder, builder.add(ahead, distance))
                    of_quad = builder.mul(quads.index, int64(_QUAD))
                    for part, row_totals in zip(parts, totals, strict=True):
                        number = _splat(builder, load(_I32, builder.add(part, of_quad)))
                        for weight, total in zip(vectors, row_totals, strict=True):
                            builder.store(multiply_quads(builder, builder.load(total), weight, number), total)
                scales = [load(F32X16, weights, _WEIGHT_BYTES + half) for half in halves]
                for r, (part, row_totals) in enumerate(zip(parts, totals, strict=True)):
                    row_scale = _splat(builder, load(_F32, part, GROUP))
                    for half, scale, total in zip(halves, scales, row_totals, strict=True):
                        target = builder.add(sums, int64(r * PANEL * F32 + half))
                        operands = [
                            builder.sitofp(builder.load(total), F32X16),
                            builder.fmul(scale, row_scale),
                            load(F32X16, target),
                        ]
                        added = call(builder, "llvm.fma.v16f32", F32X16, operands)
                        builder.store(added, builder.inttoptr(target, F32X16.as_pointer()), align=4)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7), generate

    return intrinsic(tile)


_emit = multiply_bytes if has_byte_products() else multiply_parts
_tile_1, _tile_2, _tile_3, _tile_4, _tile_5 = (make_tile(n, _emit) for n in range(1, 6))
_tile_6, _tile_7, _tile_8, _tile_9, _tile_10 = (make_tile(n, _emit) for n in range(6, 11))
_tile_11, _tile_12, _tile_13, _tile_14 = (make_tile(n, _emit) for n in range(11, 15))


@jit
def _multiply_tile(num_rows, sums, rows, row_stride, panel, num_groups, ahead, step):
    if num_rows == 14:
        _tile_14(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 13:
        _tile_13(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 12:
        _tile_12(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 11:
        _tile_11(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 10:
        _tile_10(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 9:
        _tile_9(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 8:
        _tile_8(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 7:
        _tile_7(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 6:
        _tile_6(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 5:
        _tile_5(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 4:
        _tile_4(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 3:
        _tile_3(sums, rows, row_stride, panel, num_groups, ahead, step)
    elif num_rows == 2:
        _tile_2(sums, rows, row_stride, panel, num_groups, ahead, step)
    else:
        _tile_1(sums, rows, row_stride, panel, num_groups, ahead, step)


@jit
def _multiply_panel(out, out_stride, width, rows, panel, bias, sums, num_rows, num_groups):
    """`width` channels of every row; strides in bytes. `sums` is the address of a tile's.

    The tiles fetch a share each of the weights that come next: memory works while the registers do.
    """
    num_tiles = (num_rows + _MOST_ROWS - 1) // _MOST_ROWS
    row_stride, panel_size = _ROW_BYTES * num_groups, _PANEL_BYTES * num_groups
    for tile in range(num_tiles):
        first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
        start0, start1 = vector.load(bias), vector.load(bias + VECTOR)
        for r in range(last - first):
            vector.store(sums + 2 * VECTOR * r, start0)
            vector.store(sums + 2 * VECTOR * r + VECTOR, start1)
        _multiply_tile(
            last - first,
            sums,
            rows + first * row_stride,
            row_stride,
            panel,
            num_groups,
            panel + panel_size + panel_size * tile // num_tiles,
            PANEL * _QUAD // num_tiles,
        )
        for r in range(last - first):
            source, target = sums + 2 * VECTOR * r, out + (first + r) * out_stride
            if width == PANEL:
                vector.store(target, vector.load(source))
                vector.store(target + VECTOR, vector.load(source + VECTOR))
            else:
                for i in range(width):
                    f32_pointer(target)[i] = f32_pointer(source)[i]


@jit
def _multiply_panels(first, last, out, rows, packed, bias, num_rows, out_features, num_groups):
    """Panels first .. last - 1 of every row."""
    scratch = np.empty(_MOST_ROWS * PANEL + LANES, np.float32)
    block_rows = max(_MOST_ROWS, _BLOCK_BYTES // (_ROW_BYTES * num_groups))
    num_blocks = (num_rows + block_rows - 1) // block_rows
    for block in range(num_blocks):
        low, high = num_rows * block // num_blocks, num_rows * (block + 1) // num_blocks
        for panel in range(first, last):
            channel = panel * PANEL
            _multiply_panel(
                out + F32 * (low * out_features + channel),
                F32 * out_features,
                min(PANEL, out_features - channel),
                rows + low * _ROW_BYTES * num_groups,
                packed + panel * _PANEL_BYTES * num_groups,
                bias + F32 * channel,
                line_in(scratch),
                high - low,
                num_groups,
            )


@jit(exact=True)
def _quantise_part(first, last, x, x_stride, workspace, in_features):
    _quantise_rows(first, last, x, x_stride, address_of(workspace), in_features)


@jit
def _multiply_part(first, last, out, workspace, packed, bias, num_rows, out_features, num_groups):
    _multiply_panels(
        first, last, out, address_of(workspace), packed, bias, num_rows, out_features, num_groups
    )


@jit(parallel=True)
def multiply_parallel(out, x, x_stride, packed, bias, num_rows, out_features, in_features, num_threads):
    """Takes what `cpu_matmul.multiply_parallel` takes; x is quantised here."""
    num_panels = (out_features + PANEL - 1) // PANEL
    num_groups = (in_features + GROUP - 1) // GROUP
    workspace = np.empty(num_rows * num_groups * _ROW_BYTES, np.uint8)
    if num_rows * in_features < 2 * NUMBERS_PER_THREAD or num_threads == 1:
        _quantise_part(0, num_rows, x, x_stride, workspace, in_features)
    else:
        for thread in prange(num_threads):
            first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
            _quantise_part(first, last, x, x_stride, workspace, in_features)
    for thread in prange(num_threads):
        first, last = num_panels * thread // num_threads, num_panels * (thread + 1) // num_threads
        _multiply_part(first, last, out, workspace, packed, bias, num_rows, out_features, num_groups)
