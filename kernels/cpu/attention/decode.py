"""Attention of single query tokens over the paged cache, walking the block tables in place.

A row's keys are cut into splits of a fixed number of keys, counted from key 0, and splits are merged in order.
So the order of every sum depends on the row alone, never on its neighbours or the number of threads.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.attention.dots import add_dots, add_weighted
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import external, f32_pointer, i32_pointer, jit
from pagemill.kernels.cpu.jit.element import size_of
from pagemill.kernels.cpu.jit.row import (
    F32,
    I32,
    LOG2_E,
    ONE,
    VECTOR,
    ZERO,
    address_of,
    cap_scores,
    fill,
    line_in,
    max_of,
    scale_columns,
    sink_weight,
    store_scaled,
    weigh,
)
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul.work_sharing import new_counter, plan_turns, take

SPLIT = 256  # keys; long enough to drown the merge, short enough that threads can share one long row
MINUS_INFINITY = np.float32(-np.inf)


@jit
def _softmax_row(scores, num_keys, distance, slope, softcap):
    """Turn scores (in units of log 2) into weights, 1 at the largest; return the largest score and the sum.

    `distance` is the first key's position relative to the query, where ALiBi is 0: softmax cancels the rest.
    """
    score = f32_pointer(scores)
    count = (num_keys + vector.LANES - 1) // vector.LANES * vector.LANES
    if softcap > ZERO:
        cap_scores(scores, num_keys, softcap)
    if slope != ZERO:
        for j in range(num_keys):
            score[j] += slope * np.float32(distance + j)
    for j in range(num_keys, count):
        score[j] = MINUS_INFINITY
    largest = max_of(scores, count, MINUS_INFINITY)
    return largest, weigh(scores, count, largest)


@jit
def _plan_splits(seq_lens, num_rows, window, splits):
    """List (row, first key, last key + 1, partial index or -1) per split; return the numbers of both."""
    count = 0
    num_partials = 0
    for row in range(num_rows):
        seq_len = int(seq_lens[row])
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
def _plan_costs(splits, num_splits, num_kv_heads):
    """Return the cost of the first n tasks, for every n. A task is one split for one KV head."""
    costs = np.zeros(num_splits * num_kv_heads + 1, np.int64)
    for task in range(num_splits * num_kv_heads):
        split = task // num_kv_heads
        costs[task + 1] = costs[task] + 8 + splits[split, 2] - splits[split, 1]
    return costs


@jit
def _score_split(
    scores, q, group, element, table, begin, end, tile_stride, keys, head_dim, block_size, next_tile
):
    """scores[g, key - begin] = q[g] . key, over the keys of one KV head; `keys` is its tile in block 0."""
    fill(scores, group * SPLIT, ZERO)
    key_bytes = size_of(element) * head_dim
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = keys + table[block] * tile_stride + (first - block * block_size) * key_bytes
        ahead = keys + table[block + 1] * tile_stride if last < end else next_tile
        add_dots(
            scores + F32 * (first - begin),
            F32 * SPLIT,
            q,
            group,
            element,
            tile,
            last - first,
            head_dim,
            ahead,
        )


@jit
def _weigh_split(
    acc, weights, group, element, table, begin, end, tile_stride, values, head_dim, block_size, next_tile
):
    """acc[g] = sum of weights[g, key - begin] * value, over the values of one KV head."""
    fill(acc, group * head_dim, ZERO)
    value_bytes = size_of(element) * head_dim
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = values + table[block] * tile_stride + (first - block * block_size) * value_bytes
        ahead = values + table[block + 1] * tile_stride if last < end else next_tile
        add_weighted(
            acc,
            weights + F32 * (first - begin),
            F32 * SPLIT,
            group,
            element,
            tile,
            last - first,
            head_dim,
            ahead,
        )


@jit
def _load_queries(q, source, head_stride, group, head_dim, scale):
    for g in range(group):
        store_scaled(q + F32 * g * head_dim, source + F32 * g * head_stride, head_dim, scale)


@jit
def _softmax_split(stats, scores, group, num_keys, distance, alibi_slopes, softcap):
    for g in range(group):
        slope = LOG2_E * f32_pointer(alibi_slopes)[g] if alibi_slopes != 0 else ZERO
        largest, total = _softmax_row(scores + F32 * g * SPLIT, num_keys, distance, slope, softcap)
        f32_pointer(stats)[2 * g], f32_pointer(stats)[2 * g + 1] = largest, total


@jit
def _store_split(target, acc, stats, is_whole_row, group, head_dim, sinks):
    for g in range(group):
        stat = f32_pointer(stats + 2 * F32 * g)
        factor = ONE / (stat[1] + sink_weight(sinks, g, stat[0])) if is_whole_row else ONE
        store_scaled(target + F32 * g * head_dim, acc + F32 * g * head_dim, head_dim, factor)


@jit
def _merge(out, partials, stats, num_splits, partial_stride, stats_stride, head_dim, sinks, head):
    """out = the softmax-weighted mean of one head's splits, in their order; strides are from split to split."""
    stat = f32_pointer(stats)
    largest = MINUS_INFINITY
    for i in range(num_splits):
        largest = max(largest, stat[i * stats_stride])
    fill(out, head_dim, ZERO)
    total = ZERO
    for i in range(num_splits):
        factor = np.exp2(stat[i * stats_stride] - largest)
        total += factor * stat[i * stats_stride + 1]
        partial = partials + F32 * i * partial_stride
        for d in range(head_dim):
            f32_pointer(out)[d] += factor * f32_pointer(partial)[d]
    store_scaled(out, out, head_dim, ONE / (total + sink_weight(sinks, head, largest)))


@jit
def _merge_rows(out, splits, num_splits, partials, stats, num_rows, num_heads, head_dim, sinks):
    """Finish the rows that have several splits, and those that have none.

    `partials` and `stats` are arrays, so that the caller keeps them: by their addresses they would be freed before.
    """
    split = 0
    for row in range(num_rows):
        first = split
        while split < num_splits and splits[split, 0] == row:
            split += 1
        target = out + F32 * row * num_heads * head_dim
        if split == first:
            fill(target, num_heads * head_dim, ZERO)
        elif splits[first, 3] >= 0:
            for head in range(num_heads):
                _merge(
                    target + F32 * head * head_dim,
                    address_of(partials) + F32 * (splits[first, 3] * num_heads + head) * head_dim,
                    address_of(stats) + F32 * 2 * (first * num_heads + head),
                    split - first,
                    num_heads * head_dim,
                    2 * num_heads,
                    head_dim,
                    sinks,
                    head,
                )


@jit
def _attend_split(
    acc,  # [group, head_dim], then scratch: q [group, head_dim], scores [group, SPLIT]
    stats,  # [group, 2]
    query,  # of the KV head's first query head
    query_head_stride,
    element,
    keys,  # the KV head's tile in block 0
    values,
    key_scales,  # the KV head's in block 0; 0 = the cache has none
    value_scales,
    table,
    begin,
    end,
    seq_len,
    num_kv_heads,
    group,
    head_dim,
    block_size,
    query_scale,
    softcap,
    slopes,
):
    """acc = the sum of the split's weighted values, stats = its largest scores and sums of weights."""
    q = acc + F32 * group * head_dim
    scores = q + F32 * group * head_dim
    tile_bytes = size_of(element) * block_size * head_dim
    stride, scale_stride = num_kv_heads * tile_bytes, F32 * num_kv_heads * block_size
    row_bytes, first_block = F32 * SPLIT, table[begin // block_size]
    _load_queries(q, query, query_head_stride, group, head_dim, query_scale)
    _score_split(
        scores, q, group, element, table, begin, end, stride, keys, head_dim, block_size,
        values + first_block * stride,
    )  # fmt: skip
    if key_scales != 0:
        scale_columns(
            scores, group, row_bytes, begin, table, begin, end, key_scales, scale_stride, block_size
        )
    _softmax_split(stats, scores, group, end - begin, begin + 1 - seq_len, slopes, softcap)
    if value_scales != 0:
        scale_columns(
            scores, group, row_bytes, begin, table, begin, end, value_scales, scale_stride, block_size
        )
    _weigh_split(
        acc, scores, group, element, table, begin, end, stride, values, head_dim, block_size,
        keys + first_block * stride + tile_bytes,
    )  # fmt: skip


@jit
def _attend_turns(
    thread, splits, turns, counter, partials, stats, scratch, thread_lines, out, query, query_row_stride,
    query_head_stride, element, key_cache, value_cache, key_scales, value_scales, block_tables, block_table_stride,
    seq_lens, num_kv_heads, group, head_dim, block_size, query_scale, softcap, alibi_slopes, sinks,
):  # fmt: skip
    """Run one thread's tasks, turn by turn."""
    num_heads, tile_bytes = num_kv_heads * group, size_of(element) * block_size * head_dim
    acc = line_in(scratch) + VECTOR * thread * thread_lines
    turn = take(line_in(counter))
    while turn < len(turns) - 1:
        for task in range(turns[turn], turns[turn + 1]):
            kv_head = task % num_kv_heads
            row, begin, end, partial = splits[task // num_kv_heads]
            head = kv_head * group
            scale_offset = F32 * kv_head * block_size
            task_stats = address_of(stats) + F32 * 2 * task * group
            _attend_split(
                acc,
                task_stats,
                query + F32 * (row * query_row_stride + head * query_head_stride),
                query_head_stride,
                element,
                key_cache + kv_head * tile_bytes,
                value_cache + kv_head * tile_bytes,
                key_scales + scale_offset if key_scales != 0 else 0,
                value_scales + scale_offset if value_scales != 0 else 0,
                i32_pointer(block_tables + I32 * row * block_table_stride),
                begin,
                end,
                int(i32_pointer(seq_lens)[row]),
                num_kv_heads,
                group,
                head_dim,
                block_size,
                query_scale,
                softcap,
                alibi_slopes + F32 * head if alibi_slopes != 0 else 0,
            )
            if partial < 0:
                target = out + F32 * (row * num_heads + head) * head_dim
            else:
                target = address_of(partials) + F32 * (partial * num_heads + head) * head_dim
            head_sinks = sinks + F32 * head if sinks != 0 else 0
            _store_split(target, acc, task_stats, partial < 0, group, head_dim, head_sinks)
        turn = take(line_in(counter))


@external
def decode(
    out,  # [num_rows, num_kv_heads * group, head_dim]
    query,  # the same shape, with strides
    query_row_stride,
    query_head_stride,
    element,  # the caches'
    key_cache,
    value_cache,
    key_scales,  # address 0 = the caches have none
    value_scales,
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
    sinks,  # likewise
    num_threads,
):
    """Attention of rows with one query token each. Rows with seq_len 0 come out as zeros."""
    num_heads = num_kv_heads * group
    splits = np.empty((num_rows * (max_seq_len // SPLIT + 1), 4), np.int64)
    num_splits, num_partials = _plan_splits(i32_pointer(seq_lens), num_rows, window, splits)
    num_tasks = num_splits * num_kv_heads
    turns = plan_turns(_plan_costs(splits, num_splits, num_kv_heads), num_threads)
    counter = new_counter()

    partials = np.empty((num_partials, num_heads, head_dim), np.float32)
    stats = np.empty((num_tasks, group, 2), np.float32)  # largest score, sum of weights
    thread_lines = (group * (2 * head_dim + SPLIT) + vector.LANES - 1) // vector.LANES
    scratch = np.empty((num_threads * thread_lines + 1) * vector.LANES, np.float32)
    # Scores in units of log 2 before the softmax, or as fractions of the cap before the tanh.
    query_scale = np.float32(scale) * LOG2_E if softcap == 0.0 else np.float32(scale / softcap)
    arguments = (
        splits, turns, counter, partials, stats, scratch, thread_lines, out, query, query_row_stride,
        query_head_stride, element, key_cache, value_cache, key_scales, value_scales, block_tables, block_table_stride,
        seq_lens, num_kv_heads, group, head_dim, block_size, query_scale, np.float32(softcap) * LOG2_E, alibi_slopes,
        sinks,
    )  # fmt: skip
    launch(_attend_turns, num_threads, arguments)
    _merge_rows(out, splits, num_splits, partials, stats, num_rows, num_heads, head_dim, sinks)
