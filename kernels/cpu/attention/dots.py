"""Dot products and weighted sums of one token's query heads over a tile of contiguous keys or values.

Keys and values can have any dtype. The heads of a group share them, so each is loaded and converted to fp32
once.
"""

from __future__ import annotations

import torch

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, jit, prefetch
from pagemill.kernels.cpu.jit.element import ELEMENTS, load_number, load_vector, size_of
from pagemill.kernels.cpu.jit.row import F32, VECTOR

_FP32 = ELEMENTS[torch.float32]


@jit
def _load_four(element, source):
    """Load 64 values as fp32 vectors."""
    step = vector.LANES * size_of(element)
    first, second = load_vector(element, source), load_vector(element, source + step)
    return first, second, load_vector(element, source + 2 * step), load_vector(element, source + 3 * step)


@jit
def _prefetch(first, num_bytes):
    for address in range(first, first + num_bytes, VECTOR):
        prefetch(address)


@jit
def _products(q, k):
    """Multiply 64 values of a query and a key lane by lane, and sum the results into one vector."""
    low = vector.multiply_add(q[1], k[1], vector.multiply(q[0], k[0]))
    return vector.add(low, vector.multiply_add(q[3], k[3], vector.multiply(q[2], k[2])))


@jit
def add_dots(scores, stride, q, group, element, keys, num_keys, head_dim, ahead):
    """scores[g, j] += q[g] . keys[j], for a tile of contiguous keys; scores are `stride` bytes apart.

    Prefetches the same number of keys of the tile at `ahead`, four at a time, to overlap memory and
    arithmetic.
    """
    size = size_of(element)
    key_bytes = size * head_dim
    wide = head_dim // (4 * vector.LANES) * 4 * vector.LANES
    if wide == 0:
        _prefetch(ahead, num_keys * key_bytes)
    for d in range(0, wide, 4 * vector.LANES):
        for j in range(0, num_keys - 3, 4):
            key = keys + j * key_bytes + size * d
            if d == 0:
                _prefetch(ahead + j * key_bytes, 4 * key_bytes)
            k0, k1 = _load_four(element, key), _load_four(element, key + key_bytes)
            k2, k3 = _load_four(element, key + 2 * key_bytes), _load_four(element, key + 3 * key_bytes)
            for g in range(group):
                part = _load_four(_FP32, q + F32 * (g * head_dim + d))
                products = _products(part, k0), _products(part, k1), _products(part, k2), _products(part, k3)
                vector.add_sums(scores + g * stride + F32 * j, *products)
        for j in range(num_keys // 4 * 4, num_keys):
            key = _load_four(element, keys + j * key_bytes + size * d)
            for g in range(group):
                part = _load_four(_FP32, q + F32 * (g * head_dim + d))
                f32_pointer(scores + g * stride)[j] += vector.sum_lanes(_products(part, key))
    for g in range(group if wide < head_dim else 0):
        _add_narrow_dots(scores + g * stride, q + F32 * g * head_dim, element, keys, num_keys, wide, head_dim)


@jit
def _add_narrow_dots(scores, q, element, keys, num_keys, begin, head_dim):
    """Add the dot products over dimensions `begin` and up, for one head."""
    target, size = f32_pointer(scores), size_of(element)
    key_bytes = size * head_dim
    whole = head_dim // vector.LANES * vector.LANES
    for d in range(begin, whole, vector.LANES):
        q0 = vector.load(q + F32 * d)
        for j in range(num_keys):
            key = load_vector(element, keys + j * key_bytes + size * d)
            target[j] += vector.sum_lanes(vector.multiply(q0, key))
    for d in range(whole, head_dim):
        for j in range(num_keys):
            target[j] += f32_pointer(q)[d] * load_number(element, keys + j * key_bytes + size * d)


@jit
def _splat_four(numbers):
    """Load four values, each into every lane. Call before any store: LLVM repeats the loads after one."""
    four = f32_pointer(numbers)
    return vector.splat(four[0]), vector.splat(four[1]), vector.splat(four[2]), vector.splat(four[3])


@jit
def _add_four(target, weights, v0, v1, v2, v3):
    """target += four weights times one vector each, sequentially."""
    total = vector.multiply_add(weights[0], v0, vector.load(target))
    total = vector.multiply_add(weights[1], v1, total)
    total = vector.multiply_add(weights[2], v2, total)
    vector.store(target, vector.multiply_add(weights[3], v3, total))


@jit
def add_weighted(acc, weights, stride, group, element, values, num_keys, head_dim, ahead):
    """acc[g, d] += sum over j of weights[g, j] * values[j, d], for a tile of contiguous values.

    Weights are `stride` bytes apart. Prefetches the same number of values of the tile at `ahead`, four at a
    time.
    """
    size = size_of(element)
    value_bytes = size * head_dim
    wide = head_dim // (4 * vector.LANES) * 4 * vector.LANES
    if wide == 0:
        _prefetch(ahead, num_keys * value_bytes)
    for d in range(0, wide, 4 * vector.LANES):
        for j in range(0, num_keys - 3, 4):
            value = values + j * value_bytes + size * d
            if d == 0:
                _prefetch(ahead + j * value_bytes, 4 * value_bytes)
            v0, v1 = _load_four(element, value), _load_four(element, value + value_bytes)
            v2 = _load_four(element, value + 2 * value_bytes)
            v3 = _load_four(element, value + 3 * value_bytes)
            for g in range(group):
                target, weight = acc + F32 * (g * head_dim + d), _splat_four(weights + g * stride + F32 * j)
                _add_four(target, weight, v0[0], v1[0], v2[0], v3[0])
                _add_four(target + VECTOR, weight, v0[1], v1[1], v2[1], v3[1])
                _add_four(target + 2 * VECTOR, weight, v0[2], v1[2], v2[2], v3[2])
                _add_four(target + 3 * VECTOR, weight, v0[3], v1[3], v2[3], v3[3])
    for g in range(group):
        row, target = weights + g * stride, acc + F32 * g * head_dim
        if num_keys % 4:
            left = num_keys // 4 * 4
            _add_narrow(target, row, element, values, left, num_keys, 0, wide, head_dim)
        if wide < head_dim:
            _add_narrow(target, row, element, values, 0, num_keys, wide, head_dim, head_dim)


@jit
def _add_narrow(acc, weights, element, values, first, last, begin, end, head_dim):
    """Add dimensions begin .. end - 1 of the weighted values first .. last - 1, for one head."""
    weight, size = f32_pointer(weights), size_of(element)
    value_bytes = size * head_dim
    whole = end // vector.LANES * vector.LANES
    for d in range(begin, whole, vector.LANES):
        a0 = vector.load(acc + F32 * d)
        for j in range(first, last):
            value = load_vector(element, values + j * value_bytes + size * d)
            a0 = vector.multiply_add(vector.splat(weight[j]), value, a0)
        vector.store(acc + F32 * d, a0)
    for d in range(max(begin, whole), end):
        for j in range(first, last):
            value = load_number(element, values + j * value_bytes + size * d)
            f32_pointer(acc)[d] += weight[j] * value
