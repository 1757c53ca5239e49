"""Find the integers behind a weight: grids of evenly spaced values, one per 32 inputs of a channel.

A checkpoint of quantized weights holds small integers with scales, which reach the matmuls as fp32 values.
These values reveal the integers. A grid is accepted only if it reproduces every value exactly (a zero may
lose its sign).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import f32_pointer, i8_pointer, i32_pointer, jit, use_torch_threads
from pagemill.kernels.cpu.jit.row import F32, ONE, VECTOR, ZERO, address_of
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call, emit_splat
from pagemill.kernels.cpu.matmul.weight_formats import GROUP

SIGNED_NIBBLES, OFFSET_NIBBLES, SIGNED_BYTES = range(3)
"""Grids of integers -8 to 7 and -127 to 127 times a scale, and 0 to 15 times a scale plus an offset."""

_SIGNED_NIBBLE, _NIBBLE, _BYTE = 8, 15, 127
# Significant bits of a scale, up to 24: an fp16's, and those of an fp16 times a small integer. A grid's
# values are rounded, so they determine its scale to about 20 bits. If several grids fit, the shortest scale
# is used.
_SCALE_BITS = (11, 19, 24)

_ir = cgutils.ir
_I64 = _ir.IntType(64)
_I8X16, _I32X16 = _ir.VectorType(_ir.IntType(8), LANES), _ir.VectorType(_ir.IntType(32), LANES)


class Integers(NamedTuple):
    """A weight [out_features, in_features] as numbers * scales + offsets."""

    numbers: torch.Tensor
    """int8 [out_features, num_groups, GROUP]"""
    scales: torch.Tensor
    """fp32 [out_features, num_groups]"""
    offsets: torch.Tensor
    """fp32 [out_features, num_groups]; zeros, except OFFSET_NIBBLES."""


def find(weight: torch.Tensor, grid: int) -> Integers | None:
    """Return the integers of a weight [out_features, in_features], fp32, or None if it does not fit such grids."""
    out_features, in_features = weight.shape
    if in_features % GROUP:
        return None
    weight = weight.contiguous()
    num_groups = in_features // GROUP
    numbers = torch.empty(out_features, num_groups, GROUP, dtype=torch.int8)
    scales, offsets = torch.empty(2, out_features, num_groups)
    misfits = np.zeros(1, np.int64)
    addresses = (weight.data_ptr(), numbers.data_ptr(), scales.data_ptr(), offsets.data_ptr())
    _fit_parallel(grid, addresses, out_features, num_groups, misfits, use_torch_threads())
    return None if misfits[0] else Integers(numbers, scales, offsets)


@intrinsic
def _fits(
    typing_context: Any, source: Any, scale: Any, offset: Any, least: Any, most: Any, codes: Any
) -> Any:
    """Write the grid numbers nearest to the GROUP floats at `source` to `codes`; return 1 if all are equal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, scale, offset, least, most, codes = arguments
        scales, offsets, lowest, highest = (emit_splat(builder, x) for x in (scale, offset, least, most))
        equal = None
        for half in range(GROUP // LANES):
            at = builder.add(source, _I64(half * VECTOR))
            numbers = builder.load(builder.inttoptr(at, F32X16.as_pointer()), align=4)
            steps = call(
                builder, "llvm.rint.v16f32", F32X16, [builder.fdiv(builder.fsub(numbers, offsets), scales)]
            )
            steps = builder.select(builder.fcmp_ordered(">", steps, lowest), steps, lowest)
            steps = builder.select(builder.fcmp_ordered("<", steps, highest), steps, highest)
            same = builder.fcmp_ordered(
                "==", call(builder, "llvm.fma.v16f32", F32X16, [steps, scales, offsets]), numbers
            )
            equal = same if equal is None else builder.and_(equal, same)
            target = builder.inttoptr(builder.add(codes, _I64(half * LANES)), _I8X16.as_pointer())
            builder.store(builder.trunc(builder.fptosi(steps, _I32X16), _I8X16), target, align=1)
        bit = _ir.IntType(1)
        return builder.zext(call(builder, "llvm.vector.reduce.and.v16i1", bit, [equal]), _I64)

    return types.int64(*[types.int64, *[types.float32] * 4, types.int64]), generate


@jit(exact=True)
def _rounded(number, bits, scratch):
    """Round a positive float to `bits` significant bits, to nearest."""
    f32_pointer(scratch)[0] = number
    dropped = 24 - bits
    half = (1 << dropped) >> 1
    i32_pointer(scratch)[0] = np.int32((i32_pointer(scratch)[0] + half) >> dropped << dropped)
    return f32_pointer(scratch)[0]


@jit(exact=True)
def _fit_levels(source, low, width, levels, bits, least, most, codes, scratch):
    """Return the `bits`-bit scale that makes the group a grid of `levels` steps over `width`; 0 if there is none."""
    scale = _rounded(width / np.float32(levels), bits, scratch) if width > ZERO else ONE
    return scale if _fits(source, scale, low, np.float32(least), np.float32(most), codes) else ZERO


@jit(exact=True)
def _fit_offset(source, low, high, codes, scratch):
    for bits in _SCALE_BITS:
        for levels in range(_NIBBLE, 0, -1):
            scale = _fit_levels(source, low, high - low, levels, bits, 0, _NIBBLE, codes, scratch)
            if scale != ZERO:
                return scale
    return ZERO


@jit(exact=True)
def _fit_signed(source, largest, most, codes, scratch):
    for bits in _SCALE_BITS:
        # A group's largest value nearly always has the largest code.
        for turn in range(most):
            levels = most if turn == 0 else turn
            scale = _fit_levels(source, ZERO, largest, levels, bits, -most, most, codes, scratch)
            if scale != ZERO:
                return scale
    return ZERO


@jit
def _without_highest(codes):
    """Negate a group's codes if one is 8, so that all are -8 to 7; return the scale's sign, or 0 if neither fits."""
    numbers = i8_pointer(codes)
    low = high = numbers[0]
    for i in range(1, GROUP):
        low, high = min(low, numbers[i]), max(high, numbers[i])
    if high < _SIGNED_NIBBLE:
        return ONE
    if low == -_SIGNED_NIBBLE:
        return ZERO
    for i in range(GROUP):
        numbers[i] = -numbers[i]
    return -ONE


@jit(exact=True)
def fit_group(grid, source, codes, scratch):
    """Return (scale, offset) that reproduce the GROUP floats at `source` from integers, written to `codes`.

    Scale 0 means that there are none.
    """
    numbers = f32_pointer(source)
    low = high = numbers[0]
    for i in range(1, GROUP):
        low, high = min(low, numbers[i]), max(high, numbers[i])
    if grid == OFFSET_NIBBLES:
        return _fit_offset(source, low, high, codes, scratch), low
    largest = max(-low, high)
    if grid == SIGNED_BYTES:
        return _fit_signed(source, largest, _BYTE, codes, scratch), ZERO
    scale = _fit_signed(source, largest, _SIGNED_NIBBLE, codes, scratch)
    return (scale * _without_highest(codes) if scale != ZERO else ZERO), ZERO


@jit(allocates=True)
def _fit_channels(first, last, grid, addresses, num_groups, misfits):
    weight, codes, scales, offsets = addresses
    scratch = np.empty(VECTOR // F32, np.float32)
    for channel in range(first, last):
        if misfits[0] != 0:
            return
        for group in range(num_groups * channel, num_groups * (channel + 1)):
            source, target = weight + F32 * GROUP * group, codes + GROUP * group
            scale, offset = fit_group(grid, source, target, address_of(scratch))
            if scale == ZERO:
                misfits[0] = 1
                return
            f32_pointer(scales)[group], f32_pointer(offsets)[group] = scale, offset


@jit
def _fit_parallel(grid, addresses, num_channels, num_groups, misfits, num_threads):
    """Fit all channels; stop at the first misfit, which every thread checks before its next channel."""
    launch_rows(_fit_channels, num_threads, num_channels, (grid, addresses, num_groups, misfits))
