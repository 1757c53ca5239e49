"""Writing this step's keys and values to their slots."""

from __future__ import annotations

from numba import prange

from kernels.cpu_jit import i64_pointer, jit
from kernels.cpu_row import F32, ONE, store_scaled


@jit
def write_tokens(
    first,  # tokens first .. last - 1 are written
    last,
    key,  # [num_tokens, num_kv_heads, head_dim], with strides
    key_stride,
    key_head_stride,
    value,
    value_stride,
    value_head_stride,
    key_cache,
    value_cache,
    slot_mapping,
    num_kv_heads,
    block_size,
    head_dim,
):
    for token in range(first, last):
        slot = i64_pointer(slot_mapping)[token]
        if slot < 0:
            continue
        block, offset = slot // block_size, slot % block_size
        for head in range(num_kv_heads):
            target = F32 * ((block * num_kv_heads + head) * block_size + offset) * head_dim
            source = key + F32 * (token * key_stride + head * key_head_stride)
            store_scaled(key_cache + target, source, head_dim, ONE)
            source = value + F32 * (token * value_stride + head * value_head_stride)
            store_scaled(value_cache + target, source, head_dim, ONE)


@jit(parallel=True)
def write_tokens_parallel(num_threads, num_tokens, *arguments):
    for thread in prange(num_threads):
        first, last = num_tokens * thread // num_threads, num_tokens * (thread + 1) // num_threads
        write_tokens(first, last, *arguments)
