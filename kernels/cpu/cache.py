"""Write a step's keys and values to their slots, rounded to the cache's dtype."""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, i64_pointer, jit
from pagemill.kernels.cpu.jit.element import size_of, store_number, store_vector
from pagemill.kernels.cpu.jit.row import F32, ONE, ZERO, peak_of
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK

_SMALLEST_PEAK = np.float32(SMALLEST_PEAK)


@jit
def _store_head(element, target, source, count, scale, limit):
    """Write one head of one token.

    With a `limit`, values are divided by a scale so that their peak equals the limit.
    """
    factor = ONE
    if limit > ZERO:
        peak = max(peak_of(source, count), _SMALLEST_PEAK)
        f32_pointer(scale)[0] = peak / limit
        factor = limit / peak
    lanes, size = count // vector.LANES * vector.LANES, size_of(element)
    factors = vector.splat(factor)
    for i in range(0, lanes, vector.LANES):
        numbers = vector.multiply(vector.load(source + F32 * i), factors)
        store_vector(element, target + size * i, numbers)
    for i in range(lanes, count):
        store_number(element, target + size * i, f32_pointer(source)[i] * factor)


@jit
def write_tokens(
    first,  # tokens first .. last - 1 are written
    last,
    element,  # of the cache
    key,  # [num_tokens, num_kv_heads, head_dim] fp32, with strides
    key_stride,
    key_head_stride,
    value,
    value_stride,
    value_head_stride,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    limit,  # the largest value of a scaled cache; 0 = the cache has no scales
    slot_mapping,
    num_kv_heads,
    block_size,
    head_dim,
):
    size = size_of(element)
    for token in range(first, last):
        slot = i64_pointer(slot_mapping)[token]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            at = (block * num_kv_heads + head) * block_size + offset
            source = key + F32 * (token * key_stride + head * key_head_stride)
            target = key_cache + size * at * head_dim
            _store_head(element, target, source, head_dim, key_scales + F32 * at, limit)
            source = value + F32 * (token * value_stride + head * value_head_stride)
            target = value_cache + size * at * head_dim
            _store_head(element, target, source, head_dim, value_scales + F32 * at, limit)


@jit
def write_tokens_parallel(num_threads, num_tokens, *arguments):
    launch_rows(write_tokens, num_threads, num_tokens, arguments)
