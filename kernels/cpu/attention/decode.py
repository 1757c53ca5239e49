"""Attention of single query tokens over the paged cache, walking the block tables in place.

A row's keys are cut into splits of a fixed number of keys, counted from key 0, and splits are merged in order.
So the order of every sum depends on the row alone, never on its neighbours or the number of threads.

Rows whose tables begin with the same blocks take these together, as the query heads of one row do: a key is loaded,
and becomes fp32, once for all of them, and each row's sums are what they are without the others.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.attention.decode_tasks import (
    BEGIN,
    COUNT,
    END,
    FIRST_SPLIT_KEY,
    KV_HEAD,
    PARTIAL,
    PLACE,
    SHARED_END,
    SPLIT,
    most_rows_of_a_task,
    num_splits,
    plan_order,
    plan_rows,
    plan_tasks,
)
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

SCORES = SPLIT + vector.LANES
"""From a head's scores to the next one's: a power of two would put those of one key into few sets of a cache."""
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
def _part_of(part, task, rows, order, end):
    """A row of the task, and the keys of a part: part 0 is what the rows share, part n what the n-th goes on with."""
    place, begin, shared_end = task[PLACE], task[FIRST_SPLIT_KEY], task[SHARED_END]
    if part == 0:
        return order[place, 0], begin, shared_end
    row = order[place + part - 1, 0]
    return row, shared_end, min(rows[row, END], end)


@jit
def _tile_after(
    part, task, rows, order, end, block_tables, block_table_stride, tiles, block_size, stride, other
):
    """Where the part after this one begins, if there is any, else `other`: to be fetched ahead."""
    if part < task[COUNT]:
        row, first, last = _part_of(part + 1, task, rows, order, end)
        if first < last:
            table = i32_pointer(block_tables + I32 * row * block_table_stride)
            return tiles + table[first // block_size] * stride
    return other


@jit
def _score_keys(
    scores,
    q,
    num_heads,
    element,
    table,
    origin,
    begin,
    end,
    tile_stride,
    keys,
    head_dim,
    block_size,
    next_tile,
):
    """scores[h, key - origin] += q[h] . key, over the keys of one KV head; `keys` is its tile in block 0."""
    key_bytes = size_of(element) * head_dim
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = keys + table[block] * tile_stride + (first - block * block_size) * key_bytes
        ahead = keys + table[block + 1] * tile_stride if last < end else next_tile
        add_dots(
            scores + F32 * (first - origin),
            F32 * SCORES,
            q,
            num_heads,
            element,
            tile,
            last - first,
            head_dim,
            ahead,
        )


@jit
def _weigh_values(
    acc,
    weights,
    num_heads,
    element,
    table,
    origin,
    begin,
    end,
    tile_stride,
    values,
    head_dim,
    block_size,
    next_tile,
):
    """acc[h] += sum of weights[h, key - origin] * value, over the values of one KV head."""
    value_bytes = size_of(element) * head_dim
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = values + table[block] * tile_stride + (first - block * block_size) * value_bytes
        ahead = values + table[block + 1] * tile_stride if last < end else next_tile
        add_weighted(
            acc,
            weights + F32 * (first - origin),
            F32 * SCORES,
            num_heads,
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
def _softmax_heads(stats, scores, group, num_keys, distance, alibi_slopes, softcap):
    for g in range(group):
        slope = LOG2_E * f32_pointer(alibi_slopes)[g] if alibi_slopes != 0 else ZERO
        largest, total = _softmax_row(scores + F32 * g * SCORES, num_keys, distance, slope, softcap)
        f32_pointer(stats)[2 * g], f32_pointer(stats)[2 * g + 1] = largest, total


@jit
def _store_heads(target, acc, stats, is_whole_row, group, head_dim, sinks):
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
def _merge_rows(out, rows, num_rows, partials, stats, num_heads, head_dim, sinks):
    """Finish the rows that have several splits, and those that have none.

    `partials` and `stats` are arrays, so that the caller keeps them: by their addresses they would be freed before.
    """
    for row in range(num_rows):
        target = out + F32 * row * num_heads * head_dim
        if rows[row, END] == 0:
            fill(target, num_heads * head_dim, ZERO)
        elif rows[row, PARTIAL] >= 0:
            for head in range(num_heads):
                first = rows[row, PARTIAL] * num_heads + head
                _merge(
                    target + F32 * head * head_dim,
                    address_of(partials) + F32 * first * head_dim,
                    address_of(stats) + F32 * 2 * first,
                    num_splits(rows[row, BEGIN], rows[row, END]),
                    num_heads * head_dim,
                    2 * num_heads,
                    head_dim,
                    sinks,
                    head,
                )


@jit
def _attend_task(
    task,
    rows,
    order,
    acc,  # [heads of the task, head_dim], then scratch: q [heads, head_dim], scores [heads, SCORES], stats [heads, 2]
    partials,
    stats,
    out,
    query,
    query_row_stride,
    query_head_stride,
    element,
    key_cache,
    value_cache,
    key_scales,
    value_scales,
    block_tables,
    block_table_stride,
    num_kv_heads,
    group,
    head_dim,
    block_size,
    query_scale,
    softcap,
    alibi_slopes,
    sinks,
):
    """Put the sums of weighted values of the task's rows where they belong: into `out`, or with `partials`."""
    num_heads, head, count = num_kv_heads * group, task[KV_HEAD] * group, task[COUNT]
    begin = task[FIRST_SPLIT_KEY]
    end = begin // SPLIT * SPLIT + SPLIT
    head_bytes, row_bytes = F32 * head_dim, F32 * SCORES
    q = acc + count * group * head_bytes
    scores = q + count * group * head_bytes
    task_stats = scores + count * group * row_bytes
    tile_bytes = size_of(element) * block_size * head_dim
    stride, scale_stride = num_kv_heads * tile_bytes, F32 * num_kv_heads * block_size
    keys, values = key_cache + task[KV_HEAD] * tile_bytes, value_cache + task[KV_HEAD] * tile_bytes
    scale_offset = F32 * task[KV_HEAD] * block_size

    for i in range(count):
        source = query + F32 * (order[task[PLACE] + i, 0] * query_row_stride + head * query_head_stride)
        _load_queries(q + i * group * head_bytes, source, query_head_stride, group, head_dim, query_scale)
    fill(scores, count * group * SCORES, ZERO)
    # Part 0 is for the heads of all rows at once. The two kinds share a call, and so machine code and rounding.
    for part in range(count + 1):
        row, first, last = _part_of(part, task, rows, order, end)
        if first < last:
            table = i32_pointer(block_tables + I32 * row * block_table_stride)
            place, size = max(part - 1, 0) * group, group if part > 0 else count * group
            ahead = _tile_after(
                part, task, rows, order, end, block_tables, block_table_stride, keys, block_size, stride,
                values + table[begin // block_size] * stride,
            )  # fmt: skip
            _score_keys(
                scores + place * row_bytes, q + place * head_bytes, size, element, table, begin, first, last,
                stride, keys, head_dim, block_size, ahead,
            )  # fmt: skip
            if key_scales != 0:
                scale_columns(
                    scores + place * row_bytes, size, row_bytes, begin, table, first, last,
                    key_scales + scale_offset, scale_stride, block_size,
                )  # fmt: skip
    for i in range(count):
        row = order[task[PLACE] + i, 0]
        _softmax_heads(
            task_stats + 2 * F32 * i * group, scores + i * group * row_bytes, group, min(rows[row, END], end) - begin,
            begin + 1 - rows[row, END], alibi_slopes + F32 * head if alibi_slopes != 0 else 0, softcap,
        )  # fmt: skip
    fill(acc, count * group * head_dim, ZERO)
    for part in range(count + 1):
        row, first, last = _part_of(part, task, rows, order, end)
        if first < last:
            table = i32_pointer(block_tables + I32 * row * block_table_stride)
            place, size = max(part - 1, 0) * group, group if part > 0 else count * group
            if value_scales != 0:
                scale_columns(
                    scores + place * row_bytes, size, row_bytes, begin, table, first, last,
                    value_scales + scale_offset, scale_stride, block_size,
                )  # fmt: skip
            ahead = _tile_after(
                part, task, rows, order, end, block_tables, block_table_stride, values, block_size, stride,
                keys + table[begin // block_size] * stride + tile_bytes,
            )  # fmt: skip
            _weigh_values(
                acc + place * head_bytes, scores + place * row_bytes, size, element, table, begin, first, last,
                stride, values, head_dim, block_size, ahead,
            )  # fmt: skip
    for i in range(count):
        row, at = order[task[PLACE] + i, 0], i * group
        partial, row_stats = rows[row, PARTIAL], task_stats + 2 * F32 * at
        target = out + F32 * (row * num_heads + head) * head_dim
        if partial >= 0:
            partial = (partial + begin // SPLIT - rows[row, BEGIN] // SPLIT) * num_heads + head
            target = address_of(partials) + F32 * partial * head_dim
            for g in range(2 * group):
                f32_pointer(address_of(stats) + 2 * F32 * partial)[g] = f32_pointer(row_stats)[g]
        head_sinks = sinks + F32 * head if sinks != 0 else 0
        _store_heads(target, acc + at * head_bytes, row_stats, partial < 0, group, head_dim, head_sinks)


@jit
def _attend_turns(
    thread, tasks, turns, counter, scratch, thread_lines, rows, order, partials, stats, out, query, query_row_stride,
    query_head_stride, element, key_cache, value_cache, key_scales, value_scales, block_tables, block_table_stride,
    num_kv_heads, group, head_dim, block_size, query_scale, softcap, alibi_slopes, sinks,
):  # fmt: skip
    """Run one thread's tasks, turn by turn."""
    acc = line_in(scratch) + VECTOR * thread * thread_lines
    turn = take(line_in(counter))
    while turn < len(turns) - 1:
        for task in range(turns[turn], turns[turn + 1]):
            _attend_task(
                tasks[task], rows, order, acc, partials, stats, out, query, query_row_stride, query_head_stride,
                element, key_cache, value_cache, key_scales, value_scales, block_tables, block_table_stride,
                num_kv_heads, group, head_dim, block_size, query_scale, softcap, alibi_slopes, sinks,
            )  # fmt: skip
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
    sharing,  # of `shared_blocks`; address 0 = no row shares blocks with another
    num_rows,
    num_kv_heads,
    group,  # query heads per KV head
    head_dim,
    block_size,
    scale,
    window,  # 0 = none
    softcap,  # 0 = none
    alibi_slopes,  # address 0 = none
    sinks,  # likewise
    num_threads,
):
    """Attention of rows with one query token each. Rows with seq_len 0 come out as zeros."""
    num_heads = num_kv_heads * group
    rows = np.empty((num_rows, 3), np.int64)
    order = np.empty((num_rows, 2), np.int64)
    num_row_splits, num_partials = plan_rows(rows, i32_pointer(seq_lens), num_rows, window)
    plan_order(order, sharing, rows, num_rows, block_size)
    most_rows = most_rows_of_a_task(num_row_splits * num_kv_heads, group, num_threads)
    tasks, costs, most_rows = plan_tasks(rows, order, num_rows, num_row_splits, num_kv_heads, most_rows)
    turns = plan_turns(costs, num_threads)
    counter = new_counter()

    partials = np.empty((num_partials, num_heads, head_dim), np.float32)
    stats = np.empty((num_partials, num_heads, 2), np.float32)  # largest score, sum of weights
    head_size = 2 * head_dim + SCORES + 2
    thread_lines = (most_rows * group * head_size + vector.LANES - 1) // vector.LANES
    scratch = np.empty((num_threads * thread_lines + 1) * vector.LANES, np.float32)
    # Scores in units of log 2 before the softmax, or as fractions of the cap before the tanh.
    query_scale = np.float32(scale) * LOG2_E if softcap == 0.0 else np.float32(scale / softcap)
    arguments = (
        tasks, turns, counter, scratch, thread_lines, rows, order, partials, stats, out, query, query_row_stride,
        query_head_stride, element, key_cache, value_cache, key_scales, value_scales, block_tables, block_table_stride,
        num_kv_heads, group, head_dim, block_size, query_scale, np.float32(softcap) * LOG2_E, alibi_slopes, sinks,
    )  # fmt: skip
    launch(_attend_turns, num_threads, arguments)
    _merge_rows(out, rows, num_rows, partials, stats, num_heads, head_dim, sinks)
