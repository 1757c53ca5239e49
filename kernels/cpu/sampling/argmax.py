"""The largest value of each row and its index, in one pass over the values.

torch keeps an index for every maximum, value by value. This kernel first computes the maxima of short
stretches in complete vectors. It then searches only the stretch that contains the largest value.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import (
    NUMBERS_PER_THREAD,
    f32_pointer,
    i64_pointer,
    jit,
    use_torch_threads,
)
from pagemill.kernels.cpu.jit.row import F32, VECTOR
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.cpu.jit.vector import LANES, call, f32x16

_ir = cgutils.ir
_STRETCH = 1024
_LOWEST = np.float32(-np.inf)


def largest(numbers: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagemill.kernels.selection.largest`; fp32, last dimension contiguous."""
    num_rows, size = numbers.shape
    peaks, places = torch.empty(num_rows), torch.empty(num_rows, dtype=torch.int64)
    num_stretches = -(-size // _STRETCH)
    maxima = torch.empty(num_rows * num_stretches)
    num_threads = max(1, min(use_torch_threads(), numbers.numel() // NUMBERS_PER_THREAD))
    arguments = (num_rows, numbers.data_ptr(), numbers.stride(0), size)
    outputs = (maxima.data_ptr(), num_stretches, peaks.data_ptr(), places.data_ptr())
    _find_largest(num_threads, *arguments, *outputs)
    return peaks, places


def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    largest(torch.zeros(1, LANES))


def _maximum(builder: Any, a: Any, b: Any, count: int) -> Any:
    """Return the larger of each pair; NaN if either is NaN."""
    return call(builder, f"llvm.maximum.v{count}f32", _ir.VectorType(_ir.FloatType(), count), [a, b])


@intrinsic
def _larger(typing_context: Any, a: Any, b: Any) -> Any:
    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        return _maximum(builder, arguments[0], arguments[1], LANES)

    return f32x16(f32x16, f32x16), generate


@intrinsic
def _largest_lane(typing_context: Any, a: Any) -> Any:
    """Return the largest of 16 values; NaN if any is NaN."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        value, count = arguments[0], LANES
        while count > 1:
            count //= 2
            halves = [
                builder.shuffle_vector(
                    value,
                    value,
                    _ir.Constant(_ir.VectorType(_ir.IntType(32), count), [*range(at, at + count)]),
                )
                for at in (0, count)
            ]
            value = _maximum(builder, halves[0], halves[1], count)
        return builder.extract_element(value, _ir.IntType(32)(0))

    return types.float32(f32x16), generate


@jit(exact=True)
def _is_larger(number, peak):
    """Return True if `number` replaces the earlier `peak`: it is larger, or the first NaN."""
    return number > peak or (np.isnan(number) and not np.isnan(peak))


@jit(exact=True)
def _maximum_of(source, count):
    whole = count // LANES * LANES
    a, b = vector.splat(_LOWEST), vector.splat(_LOWEST)
    c, d = vector.splat(_LOWEST), vector.splat(_LOWEST)
    unrolled = whole // (4 * LANES) * (4 * LANES)
    for at in range(source, source + F32 * unrolled, 4 * VECTOR):
        a, b = _larger(vector.load(at), a), _larger(vector.load(at + VECTOR), b)
        c, d = _larger(vector.load(at + 2 * VECTOR), c), _larger(vector.load(at + 3 * VECTOR), d)
    for at in range(source + F32 * unrolled, source + F32 * whole, VECTOR):
        a = _larger(vector.load(at), a)
    peak = _largest_lane(_larger(_larger(a, b), _larger(c, d)))
    for i in range(whole, count):
        if _is_larger(f32_pointer(source)[i], peak):
            peak = f32_pointer(source)[i]
    return peak


@jit(exact=True)
def _stretch_maxima(first, last, numbers, stride, size, maxima, num_stretches):
    """Compute the maxima of stretches first .. last - 1, counted over all rows."""
    for i in range(first, last):
        row, begin = i // num_stretches, i % num_stretches * _STRETCH
        source = numbers + F32 * (row * stride + begin)
        f32_pointer(maxima)[i] = _maximum_of(source, min(_STRETCH, size - begin))


@jit(exact=True)
def _places(num_rows, numbers, stride, size, maxima, num_stretches, peaks, places):
    for row in range(num_rows):
        of_row = maxima + F32 * row * num_stretches
        best, peak = 0, f32_pointer(of_row)[0]
        for i in range(1, num_stretches):
            if _is_larger(f32_pointer(of_row)[i], peak):
                best, peak = i, f32_pointer(of_row)[i]
        source, place = numbers + F32 * row * stride, best * _STRETCH
        while not (f32_pointer(source)[place] == peak or np.isnan(f32_pointer(source)[place])):
            place += 1
        # The first of equal values is used: zeros are equal regardless of their signs.
        f32_pointer(peaks)[row] = f32_pointer(source)[place]
        i64_pointer(places)[row] = place


@jit
def _find_largest(num_threads, num_rows, numbers, stride, size, maxima, num_stretches, peaks, places):
    arguments = (numbers, stride, size, maxima, num_stretches)
    launch_rows(_stretch_maxima, num_threads, num_rows * num_stretches, arguments)
    _places(num_rows, numbers, stride, size, maxima, num_stretches, peaks, places)
