"""Attention of many query tokens a row over the paged cache, tile by tile with an online softmax.

A tile holds the queries of some tokens for one KV head, token by token and, within a token, head by head; it
meets the keys in tiles counted from key 0. So what a token gets depends neither on its batch nor on how a prompt
was cut into chunks.
"""

from __future__ import annotations

import numpy as np
from numba import prange

from kernels import cpu_vector as vector
from kernels.cpu_element import load_number, load_vector, size_of, transpose
from kernels.cpu_jit import f32_pointer, i32_pointer, jit
from kernels.cpu_row import (
    F32,
    I32,
    LOG2_E,
    ONE,
    VECTOR,
    ZERO,
    address_of,
    cap_scores,
    fill,
    max_of,
    scale_columns,
    store_scaled,
    weigh,
)

QUERIES = 48  # rows of a tile, unless one token alone has more
KEYS = 64  # columns of a tile
HIDDEN = np.float32(-1e30)  # a masked score; finite, so that two of them may be subtracted


@jit
def _add_product(c, c_stride, a, a_stride, element, b, b_stride, num_rows, num_columns, depth):
    """c += a @ b for matrices of contiguous rows, b of `element`s; strides in bytes, `num_rows` a multiple of 4."""
    size = size_of(element)
    step = vector.LANES * size
    wide = num_columns // (2 * vector.LANES) * 2 * vector.LANES
    whole = num_columns // vector.LANES * vector.LANES
    for row in range(0, num_rows, 4):
        a0, a1 = f32_pointer(a + row * a_stride), f32_pointer(a + (row + 1) * a_stride)
        a2, a3 = f32_pointer(a + (row + 2) * a_stride), f32_pointer(a + (row + 3) * a_stride)
        for column in range(0, wide, 2 * vector.LANES):  # eight registers hold 4 x 32 sums
            c0 = c + row * c_stride + F32 * column
            c1, c2, c3 = c0 + c_stride, c0 + 2 * c_stride, c0 + 3 * c_stride
            s00, s01 = vector.load(c0), vector.load(c0 + VECTOR)
            s10, s11 = vector.load(c1), vector.load(c1 + VECTOR)
            s20, s21 = vector.load(c2), vector.load(c2 + VECTOR)
            s30, s31 = vector.load(c3), vector.load(c3 + VECTOR)
            for k in range(depth):
                source = b + k * b_stride + size * column
                b0, b1 = load_vector(element, source), load_vector(element, source + step)
                x0, x1 = vector.splat(a0[k]), vector.splat(a1[k])
                x2, x3 = vector.splat(a2[k]), vector.splat(a3[k])
                s00, s01 = vector.multiply_add(x0, b0, s00), vector.multiply_add(x0, b1, s01)
                s10, s11 = vector.multiply_add(x1, b0, s10), vector.multiply_add(x1, b1, s11)
                s20, s21 = vector.multiply_add(x2, b0, s20), vector.multiply_add(x2, b1, s21)
                s30, s31 = vector.multiply_add(x3, b0, s30), vector.multiply_add(x3, b1, s31)
            vector.store(c0, s00)
            vector.store(c0 + VECTOR, s01)
            vector.store(c1, s10)
            vector.store(c1 + VECTOR, s11)
            vector.store(c2, s20)
            vector.store(c2 + VECTOR, s21)
            vector.store(c3, s30)
            vector.store(c3 + VECTOR, s31)
        for r in range(row, row + 4):
            x, target = f32_pointer(a + r * a_stride), c + r * c_stride
            for column in range(wide, whole, vector.LANES):
                total = vector.load(target + F32 * column)
                for k in range(depth):
                    numbers = load_vector(element, b + k * b_stride + size * column)
                    total = vector.multiply_add(vector.splat(x[k]), numbers, total)
                vector.store(target + F32 * column, total)
            for column in range(whole, num_columns):
                for k in range(depth):
                    number = load_number(element, b + k * b_stride + size * column)
                    f32_pointer(target)[column] += x[k] * number


@jit
def _transpose(target, element, source, num_rows, num_columns):
    """target[column, row] = source[row, column]; target's rows are KEYS long, source's contiguous."""
    size = size_of(element)
    row_bytes, column_bytes = size * num_columns, F32 * KEYS
    whole_rows, whole_columns = num_rows // vector.LANES, num_columns // vector.LANES
    for i in range(whole_rows):
        for j in range(whole_columns):
            transpose(
                target + j * vector.LANES * column_bytes + i * VECTOR,
                column_bytes,
                element,
                source + i * vector.LANES * row_bytes + j * vector.LANES * size,
                row_bytes,
            )
    for row in range(num_rows):
        start = whole_columns * vector.LANES if row < whole_rows * vector.LANES else 0
        for column in range(start, num_columns):
            number = load_number(element, source + row * row_bytes + size * column)
            f32_pointer(target)[column * KEYS + row] = number


@jit
def _softmax_row(scores, num_columns, acc, head_dim, largest, total):
    """Turn one row's scores into weights; rescale what the row has gathered; return its new maximum and sum."""
    new_largest = max_of(scores, num_columns, largest)
    if new_largest > largest:
        factor = vector.first_lane(vector.exp2(vector.splat(largest - new_largest)))
        total *= factor
        store_scaled(acc, acc, head_dim, factor)
    return new_largest, total + weigh(scores, num_columns, new_largest)


@jit
def _softmax_tile(
    scores,
    stats,
    acc,
    num_tokens,
    num_columns,
    first_key,
    position,
    group,
    head_dim,
    window,
    slopes,
    softcap,
):
    """Mask, bias and weigh one tile of scores; `position` is that of the first token."""
    for token in range(num_tokens):
        query_position = position + token
        first_hidden = max(0, query_position + 1 - first_key)
        first_visible = min(num_columns, query_position + 1 - window - first_key) if window > 0 else 0
        for g in range(group):
            r = token * group + g
            row = scores + F32 * r * KEYS
            score = f32_pointer(row)
            if softcap > ZERO:
                cap_scores(row, num_columns, softcap)
            if slopes != 0:  # relative to the query: rounds less, and softmax cancels the difference
                slope = LOG2_E * f32_pointer(slopes)[g]
                for j in range(num_columns):
                    score[j] += slope * np.float32(first_key + j - query_position)
            for j in range(first_hidden, num_columns):
                score[j] = HIDDEN
            for j in range(first_visible):
                score[j] = HIDDEN
            stat = f32_pointer(stats + F32 * 2 * r)
            stat[0], stat[1] = _softmax_row(
                row, num_columns, acc + F32 * r * head_dim, head_dim, stat[0], stat[1]
            )


@jit
def _load_queries(q, query, token_stride, head_stride, num_tokens, group, head_dim, scale):
    for token in range(num_tokens):
        for g in range(group):
            source = query + F32 * (token * token_stride + g * head_stride)
            store_scaled(q + F32 * (token * group + g) * head_dim, source, head_dim, scale)


@jit
def _store_tile(out, token_stride, acc, stats, num_tokens, group, head_dim):
    for token in range(num_tokens):
        for g in range(group):
            r = token * group + g
            target = out + F32 * (token * token_stride + g * head_dim)
            store_scaled(target, acc + F32 * r * head_dim, head_dim, ONE / f32_pointer(stats)[2 * r + 1])


@jit
def _score_keys(
    scores,
    q,
    transposed,
    element,
    keys,
    table,
    low,
    high,
    origin,
    num_rows,
    head_dim,
    block_size,
    block_bytes,
):
    """scores[r, key - origin] = q[r] . key for the keys low .. high - 1; returns the columns that were computed."""
    key_bytes = size_of(element) * head_dim
    for block in range(low // block_size, (high - 1) // block_size + 1):
        first, last = max(low, block * block_size), min(high, (block + 1) * block_size)
        source = keys + table[block] * block_bytes + (first - block * block_size) * key_bytes
        _transpose(transposed + F32 * (first - origin), element, source, last - first, head_dim)
    num_columns = (high - origin + vector.LANES - 1) // vector.LANES * vector.LANES
    fill(scores, num_rows * KEYS, ZERO)
    _add_product(
        scores, F32 * KEYS, q, F32 * head_dim, ZERO, transposed, F32 * KEYS, num_rows, num_columns, head_dim
    )
    return num_columns


@jit
def _add_values(
    acc, scores, element, values, table, low, high, origin, num_rows, head_dim, block_size, block_bytes
):
    """acc[r] += sum of scores[r, key - origin] * value, for the keys low .. high - 1."""
    value_bytes = size_of(element) * head_dim
    for block in range(low // block_size, (high - 1) // block_size + 1):
        first, last = max(low, block * block_size), min(high, (block + 1) * block_size)
        source = values + table[block] * block_bytes + (first - block * block_size) * value_bytes
        weights = scores + F32 * (first - origin)
        _add_product(
            acc, F32 * head_dim, weights, F32 * KEYS, element, source, value_bytes, num_rows, head_dim,
            last - first,
        )  # fmt: skip


@jit
def _attend_tile(
    out,  # of the tile's first token and head
    query,  # likewise
    query_token_stride,
    query_head_stride,
    element,
    keys,  # the KV head's tile in block 0
    values,
    key_scales,  # the KV head's in block 0; 0 = the cache has none
    value_scales,
    table,
    scratch,
    num_tokens,
    position,  # of the first token
    num_kv_heads,
    group,
    head_dim,
    block_size,
    query_scale,
    window,
    softcap,
    slopes,
):
    num_rows = (num_tokens * group + 3) // 4 * 4
    block_bytes = size_of(element) * num_kv_heads * block_size * head_dim
    scale_stride = F32 * num_kv_heads * block_size
    q = scratch
    acc = q + F32 * num_rows * head_dim
    stats = acc + F32 * num_rows * head_dim
    scores = stats + F32 * 2 * num_rows
    transposed = scores + F32 * num_rows * KEYS

    fill(q, 2 * num_rows * head_dim, ZERO)  # acc with it
    _load_queries(q, query, query_token_stride, query_head_stride, num_tokens, group, head_dim, query_scale)
    for r in range(num_rows):
        f32_pointer(stats)[2 * r], f32_pointer(stats)[2 * r + 1] = HIDDEN, ZERO

    begin, end = max(0, position + 1 - window) if window > 0 else 0, position + num_tokens
    for tile in range(begin // KEYS * KEYS, end, KEYS):
        low, high = max(begin, tile), min(end, tile + KEYS)
        num_columns = _score_keys(
            scores, q, transposed, element, keys, table, low, high, tile, num_rows, head_dim, block_size,
            block_bytes,
        )  # fmt: skip
        if key_scales != 0:
            scale_columns(
                scores, num_rows, F32 * KEYS, tile, table, low, high, key_scales, scale_stride, block_size
            )
        _softmax_tile(
            scores, stats, acc, num_tokens, num_columns, tile, position, group, head_dim, window, slopes,
            softcap,
        )  # fmt: skip
        if value_scales != 0:
            scale_columns(
                scores, num_rows, F32 * KEYS, tile, table, low, high, value_scales, scale_stride, block_size
            )
        _add_values(
            acc, scores, element, values, table, low, high, tile, num_rows, head_dim, block_size, block_bytes
        )

    _store_tile(out, num_kv_heads * group * head_dim, acc, stats, num_tokens, group, head_dim)


@jit
def _plan_tiles(tiles, out, query_start_loc, seq_lens, first_row, num_rows, num_tokens_per_tile, token_size):
    """List (row, first token, number of tokens, position) per tile; return how many. Padded rows get zeros."""
    count = 0
    for row in range(first_row, num_rows):
        start, end = int(query_start_loc[row]), int(query_start_loc[row + 1])
        if seq_lens[row] == 0:
            fill(out + F32 * start * token_size, (end - start) * token_size, ZERO)
            continue
        for token in range(start, end, num_tokens_per_tile):
            tiles[count, 0] = row
            tiles[count, 1] = token
            tiles[count, 2] = min(num_tokens_per_tile, end - token)
            tiles[count, 3] = seq_lens[row] - (end - token)
            count += 1
    return count


# The parallel kernel writes through no address itself: numba would drop such a store as dead.
@jit(parallel=True)
def prefill(
    out,  # [num_tokens, num_kv_heads * group, head_dim]
    query,  # the same shape, with strides
    query_token_stride,
    query_head_stride,
    element,  # the caches'
    key_cache,
    value_cache,
    key_scales,  # address 0 = the caches have none
    value_scales,
    block_tables,
    block_table_stride,
    query_start_loc,
    seq_lens,
    first_row,
    num_rows,
    num_tokens,
    num_kv_heads,
    group,  # query heads per KV head
    head_dim,
    block_size,
    scale,
    window,  # 0 = none
    softcap,  # 0 = none
    alibi_slopes,  # address 0 = none
    num_threads,
):
    """Attention of rows first_row .. num_rows - 1, whose queries may be any number of tokens."""
    num_heads = num_kv_heads * group
    num_tokens_per_tile = max(1, QUERIES // group)
    tiles = np.empty((num_rows - first_row + num_tokens // num_tokens_per_tile, 4), np.int64)
    num_tiles = _plan_tiles(
        tiles,
        out,
        i32_pointer(query_start_loc),
        i32_pointer(seq_lens),
        first_row,
        num_rows,
        num_tokens_per_tile,
        num_heads * head_dim,
    )
    num_tasks = num_tiles * num_kv_heads
    shares = np.zeros(num_tasks + 1, np.int64)
    for task in range(num_tasks):
        _, _, count, position = tiles[task // num_kv_heads]
        visible = position + count if window == 0 else min(position + count, window + count)
        shares[task + 1] = shares[task] + (count * group + 8) * (visible + 8)

    max_rows = (num_tokens_per_tile * group + 3) // 4 * 4
    scratch_size = max_rows * (2 * head_dim + KEYS + 2) + head_dim * KEYS
    scratch = np.empty((num_threads, scratch_size), np.float32)
    # Scores in units of log 2 before the softmax, or as fractions of the cap before the tanh.
    query_scale = np.float32(scale) * LOG2_E if softcap == 0.0 else np.float32(scale / softcap)
    for thread in prange(num_threads):
        low = np.searchsorted(shares, shares[num_tasks] * thread // num_threads)
        high = np.searchsorted(shares, shares[num_tasks] * (thread + 1) // num_threads)
        for task in range(low, high):
            row, token, count, position = tiles[task // num_kv_heads]
            kv_head = task % num_kv_heads
            head = kv_head * group
            offset = size_of(element) * kv_head * block_size * head_dim
            scale_offset = F32 * kv_head * block_size
            _attend_tile(
                out + F32 * (token * num_heads + head) * head_dim,
                query + F32 * (token * query_token_stride + head * query_head_stride),
                query_token_stride,
                query_head_stride,
                element,
                key_cache + offset,
                value_cache + offset,
                key_scales + scale_offset if key_scales != 0 else 0,
                value_scales + scale_offset if value_scales != 0 else 0,
                i32_pointer(block_tables + I32 * row * block_table_stride),
                address_of(scratch) + F32 * thread * scratch_size,
                count,
                position,
                num_kv_heads,
                group,
                head_dim,
                block_size,
                query_scale,
                window,
                np.float32(softcap) * LOG2_E,
                alibi_slopes + F32 * head if alibi_slopes != 0 else 0,
            )
