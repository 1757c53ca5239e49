"""The cuts of `pagemill.kernels.selection` on a CPU; only values near the cut are sorted.

A row's values are counted in buckets by their distance from the largest one, which preserves their order. The
counts, or the sums of the buckets' probabilities, determine the bucket of the cut. Only relevant values are
sorted.
"""

from __future__ import annotations

import numpy as np
import torch

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import (
    f32_pointer,
    f64_pointer,
    i32_pointer,
    i64_pointer,
    jit,
    run_rows,
)
from pagemill.kernels.cpu.jit.row import F32, ZERO
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.cpu.jit.vector import LANES

_BUCKETS = 2048
_PER_UNIT = np.float32(64.0)
_LAST = np.float32(_BUCKETS - 1)
"""Index of the last bucket, which holds all values more than 32 below the largest."""
_SLACK = 1e-6  # the order of summation of the buckets differs from the definition's
_INDEX = (1 << 31) - 1


def kth_largest(logits: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
    """See `pagemill.kernels.selection.kth_largest`; fp32, last dimension contiguous."""
    out, counts = torch.empty((len(logits), 1)), counts.to(torch.int64).contiguous()
    size = logits.shape[1]
    arguments = (out.data_ptr(), logits.data_ptr(), logits.stride(0), size, counts.data_ptr())
    run_rows(_kth_largest_parallel, len(logits), size, arguments)
    return out


def top_p_thresholds(logits: torch.Tensor, probabilities: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """See `pagemill.kernels.selection.top_p_thresholds`; fp32, last dimension contiguous."""
    out, mass = torch.empty((len(logits), 1)), mass.to(torch.float64).contiguous()
    size = logits.shape[1]
    assert probabilities.is_contiguous()
    arguments = (
        out.data_ptr(),
        logits.data_ptr(),
        logits.stride(0),
        size,
        probabilities.data_ptr(),
        mass.data_ptr(),
    )
    run_rows(_top_p_thresholds_parallel, len(logits), size, arguments)
    return out


def warm_up() -> None:
    """Compile both kernels, or load them from disk, before a step needs them."""
    logits = torch.zeros(1, LANES)
    kth_largest(logits, torch.ones(1, dtype=torch.int64))
    top_p_thresholds(logits, logits, torch.zeros(1, dtype=torch.float64))


@jit(exact=True)
def _fill_buckets(row, size, buckets):
    """Compute each value's bucket; NaN goes to the last."""
    whole = size // LANES * LANES
    maxima = vector.splat(f32_pointer(row)[0])
    for i in range(0, whole, LANES):
        maxima = vector.maximum(vector.load(row + F32 * i), maxima)
    peak = vector.max_lanes(maxima)
    for i in range(whole, size):
        peak = max(peak, f32_pointer(row)[i])
    for i in range(size):
        distance = (peak - f32_pointer(row)[i]) * _PER_UNIT
        buckets[i] = np.int32(distance) if ZERO <= distance < _LAST else _BUCKETS - 1


@jit(exact=True)
def _sort_key(row, i):
    """Return a key that ascends while values descend; equal values are ordered by index."""
    bits = np.int64(i32_pointer(row)[i])
    if bits < 0:
        bits = np.int64(-0x80000000) - bits  # -0.0 equals 0.0, as for floats
    return -bits * (_INDEX + 1) + i


@jit(exact=True, allocates=True)
def _sort_up_to(row, size, buckets, first, last, keys):
    """Write the sorted keys of buckets first .. last to the start of `keys`; return their number."""
    count = 0
    for i in range(size):
        if first <= buckets[i] <= last:
            keys[count] = _sort_key(row, i)
            count += 1
    keys[:count].sort()
    return count


@jit(exact=True, allocates=True)
def _kth_largest(first, last, out, logits, stride, size, counts):
    buckets, keys, histogram = (
        np.empty(size, np.int32),
        np.empty(size, np.int64),
        np.empty(_BUCKETS, np.int64),
    )
    for row in range(first, last):
        source = logits + F32 * row * stride
        _fill_buckets(source, size, buckets)
        histogram[:] = 0
        for i in range(size):
            histogram[buckets[i]] += 1
        bucket, left = 0, i64_pointer(counts)[row] - 1
        while left >= histogram[bucket]:
            left -= histogram[bucket]
            bucket += 1
        _sort_up_to(source, size, buckets, bucket, bucket, keys)
        f32_pointer(out)[row] = f32_pointer(source)[keys[left] & _INDEX]


@jit(exact=True, allocates=True)
def _top_p_thresholds(first, last, out, logits, stride, size, probabilities, mass):
    buckets, keys, sums = np.empty(size, np.int32), np.empty(size, np.int64), np.empty(_BUCKETS, np.float64)
    for row in range(first, last):
        source, weights = logits + F32 * row * stride, probabilities + F32 * row * size
        wanted = f64_pointer(mass)[row]
        _fill_buckets(source, size, buckets)
        sums[:] = 0.0
        for i in range(size):
            sums[buckets[i]] += f32_pointer(weights)[i]
        bucket, reached = 0, sums[0]
        while bucket < _BUCKETS - 1 and not reached >= wanted + _SLACK:
            bucket += 1
            reached += sums[bucket]
        count = _sort_up_to(source, size, buckets, 0, bucket, keys)
        place, reached = 0, np.float64(f32_pointer(weights)[keys[0] & _INDEX])
        while reached < wanted and place < count - 1:
            place += 1
            reached += f32_pointer(weights)[keys[place] & _INDEX]
        f32_pointer(out)[row] = f32_pointer(source)[keys[place] & _INDEX]


@jit
def _kth_largest_parallel(num_threads, num_rows, *arguments):
    launch_rows(_kth_largest, num_threads, num_rows, arguments)


@jit
def _top_p_thresholds_parallel(num_threads, num_rows, *arguments):
    launch_rows(_top_p_thresholds, num_threads, num_rows, arguments)
