"""Operations of the CPU attention kernels on one row of numbers. Addresses of contiguous fp32; counts in numbers."""

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
    """cap * tanh(score) in place, for scores that come divided by the cap; rounds `count` up to whole vectors."""
    for at in range(scores, scores + F32 * count, VECTOR):
        vector.store(at, cap_vector(vector.load(at), cap))


@jit
def max_of(scores, count, start):
    """The largest of `start` and the scores; `count` is a whole number of vectors."""
    maxima = vector.splat(start)
    for at in range(scores, scores + F32 * count, VECTOR):
        maxima = vector.maximum(maxima, vector.load(at))
    return vector.max_lanes(maxima)


@jit
def peak_of(source, count):
    """The largest absolute value."""
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
    """scores = 2 ** (scores - largest) in place; return their sum. `count` is a whole number of vectors."""
    shift, sums = vector.splat(largest), vector.splat(ZERO)
    for at in range(scores, scores + F32 * count, VECTOR):
        weights = vector.exp2(vector.subtract(vector.load(at), shift))
        sums = vector.add(sums, weights)
        vector.store(at, weights)
    return vector.sum_lanes(sums)


@jit
def sink_weight(sinks, head, largest):
    """The weight of a head's sink compared with a largest score in units of log 2; `sinks` is an address, 0 = none.

    Infinite if the sink is much larger: quotients then become 0.
    """
    return np.exp2(LOG2_E * f32_pointer(sinks)[head] - largest) if sinks != 0 else ZERO


@jit
def address_of(array):
    return np.int64(array.ctypes.data)  # originally unsigned: mixed with signed offsets it would become float


@jit
def line_in(array):
    """The first cache line in an array, which has a vector of room for it: a vector across two lines costs twice."""
    return (address_of(array) + VECTOR - 1) // VECTOR * VECTOR
