"""Operations of the CPU attention kernels on one row of contiguous fp32 values, by address. Counts are in values."""

from __future__ import annotations

import math

import numpy as np

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, jit

F32 = I32 = 4  # bytes
VECTOR = F32 * vector.LANES  # bytes; also a cache line
LOG2_E = np.float32(1.0 / math.log(2.0))
ZERO, ONE = np.float32(0.0), np.float32(1.0)


@jit
def fill(target, count, value):
    for i in range(count):
        f32_pointer(target)[i] = value


@jit
def store_scaled(target, source, count, factor):
    """target = factor * source; the two may be the same."""
    for i in range(count):
        f32_pointer(target)[i] = factor * f32_pointer(source)[i]


@jit
def cap_vector(scores, cap):
    """cap * tanh(score), for scores already divided by the cap."""
    one, two = vector.splat(ONE), vector.splat(np.float32(2.0))
    power = vector.exp2(vector.multiply(vector.splat(np.float32(2.0) * LOG2_E), scores))
    tanh = vector.subtract(one, vector.divide(two, vector.add(power, one)))
    return vector.multiply(vector.splat(cap), tanh)


@jit
def cap_scores(scores, count, cap):
    """cap * tanh(score) in place, for scores already divided by the cap; rounds `count` up to complete vectors."""
    for at in range(scores, scores + F32 * count, VECTOR):
        vector.store(at, cap_vector(vector.load(at), cap))


@jit
def max_of(scores, count, start):
    """Return the largest of `start` and the scores; `count` is a multiple of the vector length."""
    maxima = vector.splat(start)
    for at in range(scores, scores + F32 * count, VECTOR):
        maxima = vector.maximum(maxima, vector.load(at))
    return vector.max_lanes(maxima)


@jit
def peak_of(source, count):
    """Return the largest absolute value."""
    whole = F32 * count // VECTOR * VECTOR
    maxima = vector.splat(ZERO)
    for at in range(0, whole, VECTOR):
        maxima = vector.maximum(maxima, vector.absolute(vector.load(source + at)))
    peak = vector.max_lanes(maxima)
    for i in range(whole // F32, count):
        peak = max(peak, abs(f32_pointer(source)[i]))
    return peak


@jit(exact=True)
def weigh(scores, count, largest):
    """scores = 2 ** (scores - largest) in place; return their sum. `count` is a multiple of the vector length."""
    shift, sums = vector.splat(largest), vector.splat(ZERO)
    for at in range(scores, scores + F32 * count, VECTOR):
        weights = vector.exp2(vector.subtract(vector.load(at), shift))
        sums = vector.add(sums, weights)
        vector.store(at, weights)
    return vector.sum_lanes(sums)


@jit
def sink_weight(sinks, head, largest):
    """Return the weight of a head's sink relative to a largest score in units of log 2.

    `sinks` is an address, or 0 for none. The weight is infinite if the sink is much larger: quotients then
    become 0.
    """
    return np.exp2(LOG2_E * f32_pointer(sinks)[head] - largest) if sinks != 0 else ZERO


@jit
def address_of(array):
    return np.int64(array.ctypes.data)  # unsigned by default: mixed with signed offsets it would become float


@jit
def line_in(array):
    """Return the first cache line in an array that is one vector larger: vectors across two lines cost twice."""
    return (address_of(array) + VECTOR - 1) // VECTOR * VECTOR
