"""Rows of floats as bytes and a scale each: what the CPU's 8-bit matrix product takes."""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels import cpu_vector as vector
from kernels.cpu_element import BIASED_BYTE, store_number, store_vector
from kernels.cpu_jit import f32_pointer, jit, run_rows
from kernels.cpu_row import F32, VECTOR, peak_of
from kernels.layer_cache import SMALLEST_PEAK

ZERO_POINT = 128  # the byte that stands for 0
_LIMIT = np.float32(127.0)
_SMALLEST_PEAK = np.float32(SMALLEST_PEAK)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Bytes [num_rows, size] and fp32 scales [num_rows]: x ~ (bytes - ZERO_POINT) * scales[:, None], to nearest.

    x: [num_rows, size] fp32 on CPU, last dimension contiguous.
    """
    assert x.dtype is torch.float32
    assert x.stride(1) == 1
    num_rows, size = x.shape
    numbers, scales = torch.empty((num_rows, size), dtype=torch.uint8), torch.empty(num_rows)
    arguments = (x.data_ptr(), x.stride(0), numbers.data_ptr(), scales.data_ptr(), size)
    run_rows(_quantise, _quantise_parallel, num_rows, size, arguments)
    return numbers, scales


@jit
def _quantise(first, last, x, stride, out, scales, size):
    whole = F32 * size // VECTOR * VECTOR
    for row in range(first, last):
        source, target = x + F32 * row * stride, out + row * size
        peak = max(peak_of(source, size), _SMALLEST_PEAK)
        f32_pointer(scales)[row] = peak / _LIMIT
        factor = _LIMIT / peak
        factors = vector.splat(factor)
        for i in range(0, whole // F32, vector.LANES):
            numbers = vector.multiply(vector.load(source + F32 * i), factors)
            store_vector(BIASED_BYTE, target + i, numbers)
        for i in range(whole // F32, size):
            store_number(BIASED_BYTE, target + i, f32_pointer(source)[i] * factor)


@jit(parallel=True)
def _quantise_parallel(num_threads, num_rows, *arguments):
    for thread in prange(num_threads):
        first, last = num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads
        _quantise(first, last, *arguments)
