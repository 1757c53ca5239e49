"""Attention of single query tokens over the paged cache, walking the block tables in place.

A row's keys are cut into splits of a fixed number of keys, counted from key 0, and splits are merged in order.
So the order of every sum depends on the row alone, never on its neighbours in the batch or on the number of threads.
"""

from __future__ import annotations

import math

import numpy as np
from numba import prange

from kernels.cpu_jit import f32_pointer, i32_pointer, jit, load, prefetch

SPLIT = 256  # keys; long enough to drown the merge, short enough that threads can share one long row
LOG2_E = 1.0 / math.log(2.0)
F32 = 4  # bytes
CACHE_LINE = 64  # bytes

# 2 ** f on [-0.5, 0.5], least squares of the relative error: 8e-8.
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(c) for c in (1.0000001, 0.69314694, 0.24022122, 0.055507425, 0.0096754599, 0.0013266971)
)
_HALF, _LOWEST_EXPONENT, _ZERO, _ONE, _TWO = (np.float32(c) for c in (0.5, -126.0, 0.0, 1.0, 2.0))


@jit
def exp2(x):
    """2 ** x for x <= 127; below -126 it stays at 2 ** -126. Plain arithmetic, so that loops over it vectorise."""
    x = max(x, _LOWEST_EXPONENT)
    whole = np.floor(x + _HALF)
    f = x - whole
    p = ((((_C5 * f + _C4) * f + _C3) * f + _C2) * f + _C1) * f + _C0
    return p * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


@jit
def _dot_rows(scores, q, keys, num_keys, head_dim):
    """scores[j] = q . keys[j] for a tile of contiguous keys."""
    for j in range(num_keys):
        total = _ZERO
        row = j * head_dim
        for d in range(head_dim):
            total += load(q, d) * load(keys, row + d)
        scores[j] = total


@jit
def _add_weighted_rows(acc, weights, values, num_keys, head_dim):
    """acc[d] += sum over j of weights[j] * values[j, d]."""
    whole = num_keys - num_keys % 4
    for j in range(0, whole, 4):
        w0, w1, w2, w3 = load(weights, j), load(weights, j + 1), load(weights, j + 2), load(weights, j + 3)
        row = j * head_dim
        for d in range(head_dim):
            acc[d] += (
                w0 * load(values, row + d)
                + w1 * load(values, row + head_dim + d)
                + w2 * load(values, row + 2 * head_dim + d)
                + w3 * load(values, row + 3 * head_dim + d)
            )
    for j in range(whole, num_keys):
        w0 = load(weights, j)
        row = j * head_dim
        for d in range(head_dim):
            acc[d] += w0 * load(values, row + d)


@jit
def _prefetch_tile(address, num_bytes):
    for offset in range(0, num_bytes, CACHE_LINE):
        prefetch(address + offset)


@jit
def _softmax_row(scores, num_keys, distance, slope, softcap):
    """Turn scores (in units of log 2) into weights, 1 at the largest; return the largest score and the sum.

    `distance` is the position of the first key relative to the query, where ALiBi is 0: softmax cancels the rest.
    """
    if softcap > _ZERO:
        for j in range(num_keys):  # cap * tanh(s); the scores came divided by the cap
            scores[j] = softcap * (_ONE - _TWO / (exp2(np.float32(2 * LOG2_E) * scores[j]) + _ONE))
    if slope != _ZERO:
        for j in range(num_keys):
            scores[j] += slope * np.float32(distance + j)
    largest = np.float32(-np.inf)
    for j in range(num_keys):
        largest = max(largest, scores[j])
    total = _ZERO
    for j in range(num_keys):
        weight = exp2(scores[j] - largest)
        scores[j] = weight
        total += weight
    return largest, total


@jit
def _plan_splits(seq_lens, num_rows, window, splits):
    """List (row, split, first key, last key + 1, partial index or -1); return the counts of splits and partials."""
    count = 0
    num_partials = 0
    for row in range(num_rows):
        seq_len = np.int64(seq_lens[row])
        begin = max(0, seq_len - window) if window > 0 else 0
        first, last = begin // SPLIT, (seq_len - 1) // SPLIT
        for split in range(first, last + 1 if seq_len > 0 else first):
            splits[count, 0] = row
            splits[count, 1] = max(begin, split * SPLIT)
            splits[count, 2] = min(seq_len, (split + 1) * SPLIT)
            splits[count, 3] = num_partials if last > first else -1
            num_partials += last > first
            count += 1
    return count, num_partials


@jit
def _score_split(scores, q, group, table, begin, end, tile_stride, keys, head_dim, block_size):
    """scores[g, key - begin] = q[g] . key, over the keys of one KV head; `keys` is its tile in block 0."""
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first = max(begin, block * block_size)
        num_keys = min(end, (block + 1) * block_size) - first
        tile = keys + F32 * (load(table, block) * tile_stride + (first - block * block_size) * head_dim)
        if (block + 1) * block_size < end:
            ahead = keys + F32 * load(table, block + 1) * tile_stride
            _prefetch_tile(ahead, F32 * head_dim * min(block_size, end - (block + 1) * block_size))
        for g in range(group):
            row = scores + F32 * (g * SPLIT + first - begin)
            _dot_rows(
                f32_pointer(row), f32_pointer(q + F32 * g * head_dim), f32_pointer(tile), num_keys, head_dim
            )


@jit
def _weigh_split(acc, weights, group, table, begin, end, tile_stride, values, head_dim, block_size):
    """acc[g] = sum of weights[g, key - begin] * value, over the values of one KV head."""
    accumulators = f32_pointer(acc)
    for i in range(group * head_dim):
        accumulators[i] = _ZERO
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first = max(begin, block * block_size)
        num_keys = min(end, (block + 1) * block_size) - first
        tile = values + F32 * (load(table, block) * tile_stride + (first - block * block_size) * head_dim)
        if (block + 1) * block_size < end:
            ahead = values + F32 * load(table, block + 1) * tile_stride
            _prefetch_tile(ahead, F32 * head_dim * min(block_size, end - (block + 1) * block_size))
        for g in range(group):
            row = f32_pointer(weights + F32 * (g * SPLIT + first - begin))
            target = f32_pointer(acc + F32 * g * head_dim)
            _add_weighted_rows(target, row, f32_pointer(tile), num_keys, head_dim)


@jit
def _merge(out, partials, stats, num_partials, num_heads, head, head_dim):
    """out = the softmax-weighted mean of one head's `num_partials` consecutive splits, in their order."""
    largest = np.float32(-np.inf)
    for i in range(num_partials):
        largest = max(largest, stats[i, head, 0])
    total = _ZERO
    for d in range(head_dim):
        out[d] = _ZERO
    for i in range(num_partials):
        factor = exp2(stats[i, head, 0] - largest)
        total += factor * stats[i, head, 1]
        for d in range(head_dim):
            out[d] += factor * partials[i, head, d]
    for d in range(head_dim):
        out[d] /= total


@jit(parallel=True)
def decode(
    out,  # [num_rows, num_kv_heads * group, head_dim]
    query,  # the same shape, with strides
    query_row_stride,
    query_head_stride,
    key_cache,
    value_cache,
    block_tables,
    block_table_stride,
    seq_lens,
    num_rows,
    num_kv_heads,
    group,  # query heads per KV head
    head_dim,
    block_size,
    max_seq_len,
    scale,
    window,  # 0 = none
    softcap,  # 0 = none
    alibi_slopes,  # address 0 = none
    num_threads,
):
    """Attention of rows with one query token each. Rows with seq_len 0 come out as zeros."""
    num_heads = num_kv_heads * group
    tile_stride = num_kv_heads * block_size * head_dim
    splits = np.empty((num_rows * (max_seq_len // SPLIT + 1), 4), np.int64)
    num_splits, num_partials = _plan_splits(i32_pointer(seq_lens), num_rows, window, splits)
    partials = np.empty((num_partials, num_heads, head_dim), np.float32)
    stats = np.empty((num_partials, num_heads, 2), np.float32)

    # Each thread takes consecutive (split, KV head) tasks holding an equal share of the keys.
    num_tasks = num_splits * num_kv_heads
    shares = np.zeros(num_tasks + 1, np.int64)
    for task in range(num_tasks):
        split = task // num_kv_heads
        shares[task + 1] = shares[task] + 8 + splits[split, 2] - splits[split, 1]
    scratch_size = group * (SPLIT + 2 * head_dim)
    scratch = np.empty(num_threads * scratch_size, np.float32)

    scale2 = np.float32(scale * LOG2_E) if softcap == 0.0 else np.float32(scale / softcap)
    softcap2 = np.float32(softcap * LOG2_E)
    for thread in prange(num_threads):
        q = scratch.ctypes.data + F32 * thread * scratch_size
        acc = q + F32 * group * head_dim
        scores = acc + F32 * group * head_dim
        low = np.searchsorted(shares, shares[num_tasks] * thread // num_threads)
        high = np.searchsorted(shares, shares[num_tasks] * (thread + 1) // num_threads)
        for task in range(low, high):
            split = task // num_kv_heads
            kv_head = task % num_kv_heads
            row, begin, end, partial = splits[split, 0], splits[split, 1], splits[split, 2], splits[split, 3]
            table = i32_pointer(block_tables + F32 * row * block_table_stride)
            q_out = f32_pointer(q)
            for g in range(group):
                source = query + F32 * (row * query_row_stride + (kv_head * group + g) * query_head_stride)
                for d in range(head_dim):
                    q_out[g * head_dim + d] = scale2 * load(f32_pointer(source), d)
            tile = F32 * kv_head * block_size * head_dim
            keys, values = key_cache + tile, value_cache + tile
            _score_split(scores, q, group, table, begin, end, tile_stride, keys, head_dim, block_size)
            distance = begin - load(i32_pointer(seq_lens), row) + 1
            for g in range(group):
                head = kv_head * group + g
                slope = _ZERO
                if alibi_slopes != 0:
                    slope = np.float32(LOG2_E) * load(f32_pointer(alibi_slopes), head)
                weights = f32_pointer(scores + F32 * g * SPLIT)
                largest, total = _softmax_row(weights, end - begin, distance, slope, softcap2)
                factor = _ONE
                if partial < 0:
                    factor = _ONE / total
                else:
                    stats[partial, head, 0] = largest
                    stats[partial, head, 1] = total
                for j in range(end - begin):
                    weights[j] *= factor
            _weigh_split(acc, scores, group, table, begin, end, tile_stride, values, head_dim, block_size)
            for g in range(group):
                head = kv_head * group + g
                target = f32_pointer(out + F32 * (row * num_heads + head) * head_dim)
                for d in range(head_dim):
                    value = load(f32_pointer(acc), g * head_dim + d)
                    if partial < 0:
                        target[d] = value
                    else:
                        partials[partial, head, d] = value

    split = 0
    for row in range(num_rows):
        first = split
        while split < num_splits and splits[split, 0] == row:
            split += 1
        for head in range(num_heads):
            target = f32_pointer(out + F32 * (row * num_heads + head) * head_dim)
            if split == first:
                for d in range(head_dim):
                    target[d] = _ZERO
            elif splits[first, 3] >= 0:
                p = splits[first, 3]
                _merge(target, partials[p:], stats[p:], split - first, num_heads, head, head_dim)
