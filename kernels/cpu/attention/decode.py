"""Attention of single query tokens over the paged cache, reading blocks in place through the block tables.

A row's keys are divided into splits of a fixed number of keys, counted from key 0. Splits are merged in
order, so the order of every sum depends only on the row, never on its neighbors or the number of threads.

Rows whose tables start with the same blocks process them together, like the query heads of one row. Each key
is loaded and converted to fp32 once for all of them. Each row's sums are the same as without the others.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagemill.kernels.cpu.attention.decode_tasks import (
    BEGIN,
    COUNT,
    END,
    FIRST_SPLIT_KEY,
    KV_HEAD,
    PARTIAL,
    PLACE,
    SPLIT,
    end_of,
    most_rows_of_a_task,
    num_splits,
    part_of,
    plan_order,
    plan_rows,
    plan_tasks,
)
from pagemill.kernels.cpu.attention.dots import add_dots, add_weighted
from pagemill.kernels.cpu.attention.operands import (
    Paged,
    Queries,
    Tables,
    key_bytes_of,
    of_head,
    rules_of,
)
from pagemill.kernels.cpu.attention.tile_walk import (
    ENTRY,
    list_walk,
    num_tiles,
    scales_at,
    tile_ahead,
    tile_at,
    walk_bytes,
)
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import external, f32_pointer, i32_pointer, jit
from pagemill.kernels.cpu.jit.row import (
    F32,
    LOG2_E,
    ONE,
    VECTOR,
    ZERO,
    address_of,
    cap_scores,
    fill,
    line_in,
    max_of,
    sink_weight,
    store_scaled,
    weigh,
)
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul.work_sharing import new_counter, plan_turns, take

SCORES = SPLIT + vector.LANES
"""Stride between the scores of two heads. A power of two would map one key's scores to few cache sets."""
MINUS_INFINITY = np.float32(-np.inf)


class _Room(NamedTuple):
    """A thread's scratch memory for the heads of one task, row by row."""

    acc: int  # [heads, head_dim]
    q: int  # likewise
    scores: int  # [heads, SCORES]
    stats: int  # [heads, 2]: the largest score, and the sum of weights
    walk: int  # the tiles that the task reads; see `tile_walk`


@jit
def _numbers_of_a_head(head_dim):
    return 2 * head_dim + SCORES + 2


@jit
def _room_in(memory, num_heads, head_dim):
    q = memory + F32 * num_heads * head_dim
    scores = q + F32 * num_heads * head_dim
    stats = scores + F32 * num_heads * SCORES
    return _Room(memory, q, scores, stats, (stats + 2 * F32 * num_heads + ENTRY - 1) // ENTRY * ENTRY)


@jit
def _softmax_row(scores, num_keys, distance, slope, softcap):
    """Turn scores (in units of log 2) into weights, 1 at the largest; return the largest score and the sum.

    `distance` is the first key's position relative to the query. ALiBi is 0 at the query; softmax cancels the
    rest.
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
def _heads_of(part, group, count):
    """Return a part's first head in the task, and the number of heads. Part 0 covers all rows."""
    return max(part - 1, 0) * group, group if part > 0 else count * group


@jit
def _score_keys(scores, q, num_heads, cache, walk, origin, begin, end):
    """scores[h, key - origin] += q[h] . key, over the keys of one KV head."""
    key_bytes, block_size = key_bytes_of(cache), cache.block_size
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = tile_at(cache, walk) + (first - block * block_size) * key_bytes
        target = scores + F32 * (first - origin)
        ahead = tile_ahead(cache, walk, last - first)
        add_dots(target, F32 * SCORES, q, num_heads, cache.element, tile, last - first, cache.head_dim, ahead)
        walk += ENTRY


@jit
def _weigh_values(acc, weights, num_heads, cache, walk, origin, begin, end):
    """acc[h] += sum of weights[h, key - origin] * value, over the values of one KV head."""
    value_bytes, block_size = key_bytes_of(cache), cache.block_size
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        tile = tile_at(cache, walk) + (first - block * block_size) * value_bytes
        source = weights + F32 * (first - origin)
        ahead = tile_ahead(cache, walk, last - first)
        add_weighted(
            acc, source, F32 * SCORES, num_heads, cache.element, tile, last - first, cache.head_dim, ahead
        )
        walk += ENTRY


@jit
def _scale_keys(scores, num_heads, cache, walk, origin, begin, end):
    """scores[h, key - origin] *= the scale of the key's or value's slot, depending on the walk's tiles."""
    block_size = cache.block_size
    for block in range(begin // block_size, (end - 1) // block_size + 1):
        first, last = max(begin, block * block_size), min(end, (block + 1) * block_size)
        source = scales_at(cache, walk) + F32 * (first - block * block_size)
        for h in range(num_heads):
            target = f32_pointer(scores + F32 * (h * SCORES + first - origin))
            for j in range(last - first):
                target[j] *= f32_pointer(source)[j]
        walk += ENTRY


@jit
def _load_queries(room, task, order, queries, cache, scale):
    group, head = queries.group, task[KV_HEAD] * queries.group
    for i in range(task[COUNT]):
        token = order[task[PLACE] + i, 0]
        source = queries.query + F32 * (token * queries.token_stride + head * queries.head_stride)
        for g in range(group):
            target = room.q + F32 * (i * group + g) * cache.head_dim
            store_scaled(target, source + F32 * g * queries.head_stride, cache.head_dim, scale)


@jit
def _score_task(room, task, rows, order, group, cache):
    """Fill the scores of the task's rows; return the position of the walk's first value tile."""
    count, begin, walk = task[COUNT], task[FIRST_SPLIT_KEY], room.walk
    fill(room.scores, count * group * SCORES, ZERO)
    # All parts use one call site, and so the same machine code and rounding.
    for part in range(count + 1):
        _, first, last = part_of(part, task, rows, order)
        if first < last:
            place, size = _heads_of(part, group, count)
            scores, q = room.scores + F32 * SCORES * place, room.q + F32 * cache.head_dim * place
            _score_keys(scores, q, size, cache, walk, begin, first, last)
            if cache.key_scales != 0:
                _scale_keys(scores, size, cache, walk, begin, first, last)
            walk += ENTRY * num_tiles(cache, first, last)
    return walk


@jit
def _softmax_task(room, task, rows, order, group, rules):
    """Turn scores into weights; `rules` are those of the task's heads."""
    begin = task[FIRST_SPLIT_KEY]
    for i in range(task[COUNT]):
        end = rows[order[task[PLACE] + i, 0], END]
        num_keys, distance = min(end, end_of(task)) - begin, begin + 1 - end
        for g in range(group):
            slope = LOG2_E * f32_pointer(rules.slopes)[g] if rules.slopes != 0 else ZERO
            scores = room.scores + F32 * SCORES * (i * group + g)
            largest, total = _softmax_row(scores, num_keys, distance, slope, rules.softcap)
            stat = f32_pointer(room.stats + 2 * F32 * (i * group + g))
            stat[0], stat[1] = largest, total


@jit
def _weigh_task(room, walk, task, rows, order, group, cache):
    """Sum the values of the task's rows by their weights; `walk` points to the tiles of values."""
    count, begin = task[COUNT], task[FIRST_SPLIT_KEY]
    fill(room.acc, count * group * cache.head_dim, ZERO)
    for part in range(count + 1):
        _, first, last = part_of(part, task, rows, order)
        if first < last:
            place, size = _heads_of(part, group, count)
            scores, acc = room.scores + F32 * SCORES * place, room.acc + F32 * cache.head_dim * place
            if cache.value_scales != 0:
                _scale_keys(scores, size, cache, walk, begin, first, last)
            _weigh_values(acc, scores, size, cache, walk, begin, first, last)
            walk += ENTRY * num_tiles(cache, first, last)


@jit
def _store_task(room, task, rows, order, partials, stats, queries, cache, rules):
    """Store the sums in `out` or in `partials`; `rules` are those of the task's heads."""
    group, begin = queries.group, task[FIRST_SPLIT_KEY]
    num_heads, head, head_bytes = cache.num_kv_heads * group, task[KV_HEAD] * group, F32 * cache.head_dim
    for i in range(task[COUNT]):
        row = order[task[PLACE] + i, 0]
        partial, row_stats = rows[row, PARTIAL], room.stats + 2 * F32 * i * group
        target = queries.out + head_bytes * (row * num_heads + head)
        if partial >= 0:
            place = (partial + begin // SPLIT - rows[row, BEGIN] // SPLIT) * num_heads + head
            target = address_of(partials) + head_bytes * place
            for g in range(2 * group):
                f32_pointer(address_of(stats) + 2 * F32 * place)[g] = f32_pointer(row_stats)[g]
        for g in range(group):
            stat = f32_pointer(row_stats + 2 * F32 * g)
            factor = ONE / (stat[1] + sink_weight(rules.sinks, g, stat[0])) if partial < 0 else ONE
            source = room.acc + head_bytes * (i * group + g)
            store_scaled(target + head_bytes * g, source, cache.head_dim, factor)


@jit
def _merge(out, partials, stats, num_splits, partial_stride, stats_stride, head_dim, sinks, head):
    """out = the softmax-weighted mean of one head's splits, in order; strides are from split to split."""
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
    """Finish the rows with several splits, and zero the rows without keys.

    `partials` and `stats` are arrays: if only their addresses were passed, they would be freed too early.
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
def _attend_task(room, task, rows, order, partials, stats, queries, cache, rules):
    """Attention of the task's rows over the keys of its split; the room's walk lists the tiles."""
    group = queries.group
    head_rules = of_head(rules, task[KV_HEAD] * group)
    _load_queries(room, task, order, queries, cache, rules.scale)
    walk = _score_task(room, task, rows, order, group, cache)
    _softmax_task(room, task, rows, order, group, head_rules)
    _weigh_task(room, walk, task, rows, order, group, cache)
    _store_task(room, task, rows, order, partials, stats, queries, cache, head_rules)


@jit
def _attend_turns(
    thread, tasks, turns, counter, scratch, thread_lines, rows, order, partials, stats, queries, cache, tables, rules
):  # fmt: skip
    """Run one thread's tasks, turn by turn."""
    memory = line_in(scratch) + VECTOR * thread * thread_lines
    turn = take(line_in(counter))
    while turn < len(turns) - 1:
        for number in range(turns[turn], turns[turn + 1]):
            task = tasks[number]
            room = _room_in(memory, task[COUNT] * queries.group, cache.head_dim)
            following = tasks[min(number + 1, turns[turn + 1] - 1)]
            list_walk(room.walk, task, following, rows, order, cache, tables)
            _attend_task(room, task, rows, order, partials, stats, queries, cache, rules)
        turn = take(line_in(counter))


@external(allocates=True)
def decode(
    out,  # [num_rows, num_kv_heads * group, head_dim]
    query,  # the same shape, with strides
    query_row_stride,
    query_head_stride,
    element,  # of the caches
    key_cache,
    value_cache,
    key_scales,  # address 0 = the caches have no scales
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
    window,  # of `first_visible`
    softcap,  # 0 = none
    alibi_slopes,  # address 0 = none
    sinks,  # likewise
    num_threads,
):
    """Attention of rows with one query token each. Rows with seq_len 0 become zeros."""
    queries = Queries(out, query, query_row_stride, query_head_stride, group)
    cache = Paged(
        element, key_cache, value_cache, key_scales, value_scales, num_kv_heads, head_dim, block_size
    )
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
    thread_bytes = (
        F32 * most_rows * group * _numbers_of_a_head(head_dim) + ENTRY + walk_bytes(cache, most_rows)
    )
    thread_lines = (thread_bytes + VECTOR - 1) // VECTOR
    scratch = np.empty((num_threads * thread_lines + 1) * vector.LANES, np.float32)
    arguments = (
        tasks, turns, counter, scratch, thread_lines, rows, order, partials, stats, queries, cache,
        Tables(block_tables, block_table_stride), rules_of(scale, window, softcap, alibi_slopes, sinks),
    )  # fmt: skip
    launch(_attend_turns, num_threads, arguments)
    _merge_rows(out, rows, num_rows, partials, stats, num_heads, head_dim, sinks)
