"""Attention of many query tokens a row over the paged cache, tile by tile with an online softmax.

A tile holds the queries of some tokens for one KV head, token by token and, within a token, head by head; it
meets the keys in tiles counted from key 0. So what a token gets depends neither on its batch nor on how a prompt
was cut into chunks.
"""

from __future__ import annotations

import numpy as np
import torch
from numba import prange

from kernels import cpu_vector as vector
from kernels.cpu_attention_panels import PANEL_ROW, gather_keys, gather_values
from kernels.cpu_element import size_of
from kernels.cpu_jit import f32_pointer, i32_pointer, jit
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL, multiply_tile
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

QUERIES = 144  # rows of a tile, unless one token alone has more
KEYS = 4 * vector.LANES  # columns of a tile
# Where vectors are shorter and registers fewer, two rows fill them.
TILE_ROWS = MOST_ROWS if torch.backends.cpu.get_cpu_capability() == "AVX512" else 2
HIDDEN = np.float32(-1e30)  # a masked score; finite, so that two of them may be subtracted


@jit
def _multiply_rows(
    out,
    out_stride,
    x,
    x_stride,
    panels,
    panel_bytes,
    start,
    start_stride,
    start_step,
    num_rows,
    num_panels,
    depth,
):
    """out[r, panel] = start[r, panel] + x[r] @ panels[panel]; strides, and `start_step` between panels, in bytes."""
    num_tiles = (num_rows + TILE_ROWS - 1) // TILE_ROWS
    for panel in range(num_panels):
        weights = panels + panel * panel_bytes
        for tile in range(num_tiles):
            first, last = num_rows * tile // num_tiles, num_rows * (tile + 1) // num_tiles
            multiply_tile(
                last - first,
                out + first * out_stride + panel * PANEL_ROW,
                out_stride,
                x + first * x_stride,
                x_stride,
                weights,
                start + first * start_stride + panel * start_step,
                start_stride,
                depth,
                weights,  # all of it is at hand: nothing to fetch ahead
                0,
            )


@jit(exact=True)
def _softmax_row(scores, num_columns, acc, head_dim, largest, total):
    """Turn one row's scores into weights; rescale what the row has gathered; return its new maximum and sum."""
    if num_columns == KEYS:
        return _softmax_whole_row(scores, acc, head_dim, largest, total)
    new_largest = max_of(scores, num_columns, largest)
    if new_largest > largest:
        total *= _rescale(acc, head_dim, largest - new_largest)
    return new_largest, total + weigh(scores, num_columns, new_largest)


@jit(exact=True)
def _softmax_whole_row(scores, acc, head_dim, largest, total):
    """The same for KEYS columns, which registers hold from the maximum to the sum; to the last bit."""
    at_b, at_c, at_d = scores + VECTOR, scores + 2 * VECTOR, scores + 3 * VECTOR
    a, b, c, d = vector.load(scores), vector.load(at_b), vector.load(at_c), vector.load(at_d)
    new_largest = vector.max_lanes(vector.maximum(vector.maximum(a, b), vector.maximum(c, d)))
    if new_largest > largest:
        total *= _rescale(acc, head_dim, largest - new_largest)
    else:
        new_largest = largest
    shift = vector.splat(new_largest)
    a, b = vector.exp2(vector.subtract(a, shift)), vector.exp2(vector.subtract(b, shift))
    c, d = vector.exp2(vector.subtract(c, shift)), vector.exp2(vector.subtract(d, shift))
    vector.store(scores, a)
    vector.store(at_b, b)
    vector.store(at_c, c)
    vector.store(at_d, d)
    return new_largest, total + vector.sum_lanes(vector.add(vector.add(vector.add(a, b), c), d))


@jit(exact=True)
def _rescale(acc, head_dim, difference):
    """acc *= 2 ** difference; returns the factor."""
    factor = vector.first_lane(vector.exp2(vector.splat(difference)))
    store_scaled(acc, acc, head_dim, factor)
    return factor


@jit
def _softmax_tile(
    scores,
    stats,
    acc,
    acc_stride,
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
                row, num_columns, acc + r * acc_stride, head_dim, stat[0], stat[1]
            )


@jit
def _load_queries(q, query, token_stride, head_stride, num_tokens, group, head_dim, scale):
    for token in range(num_tokens):
        for g in range(group):
            source = query + F32 * (token * token_stride + g * head_stride)
            store_scaled(q + F32 * (token * group + g) * head_dim, source, head_dim, scale)


@jit
def _store_tile(out, token_stride, acc, acc_stride, stats, num_tokens, group, head_dim):
    for token in range(num_tokens):
        for g in range(group):
            r = token * group + g
            target = out + F32 * (token * token_stride + g * head_dim)
            store_scaled(target, acc + r * acc_stride, head_dim, ONE / f32_pointer(stats)[2 * r + 1])


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
    num_rows = num_tokens * group
    block_bytes = size_of(element) * num_kv_heads * block_size * head_dim
    scale_stride = F32 * num_kv_heads * block_size
    num_panels = (head_dim + PANEL - 1) // PANEL
    acc_stride = PANEL_ROW * num_panels
    acc = scratch
    value_panels = acc + num_rows * acc_stride
    zeros = value_panels + PANEL_ROW * KEYS * num_panels
    stats = zeros + PANEL_ROW
    q = stats + F32 * 2 * num_rows
    scores = q + F32 * num_rows * head_dim
    key_panels = scores + F32 * num_rows * KEYS

    fill(acc, (stats - acc) // F32, ZERO)  # the values' panels with it, whose ends may stay empty
    _load_queries(q, query, query_token_stride, query_head_stride, num_tokens, group, head_dim, query_scale)
    for r in range(num_rows):
        f32_pointer(stats)[2 * r], f32_pointer(stats)[2 * r + 1] = HIDDEN, ZERO

    begin, end = max(0, position + 1 - window) if window > 0 else 0, position + num_tokens
    for tile in range(begin // KEYS * KEYS, end, KEYS):
        low, high = max(begin, tile), min(end, tile + KEYS)
        gather_keys(key_panels, element, keys, table, low, high, tile, head_dim, block_size, block_bytes)
        num_columns = (high - tile + PANEL - 1) // PANEL * PANEL
        _multiply_rows(
            scores, F32 * KEYS, q, F32 * head_dim, key_panels, PANEL_ROW * head_dim, zeros, 0, 0, num_rows,
            num_columns // PANEL, head_dim,
        )  # fmt: skip
        if key_scales != 0:
            scale_columns(
                scores, num_rows, F32 * KEYS, tile, table, low, high, key_scales, scale_stride, block_size
            )
        _softmax_tile(
            scores, stats, acc, acc_stride, num_tokens, num_columns, tile, position, group, head_dim, window,
            slopes, softcap,
        )  # fmt: skip
        if value_scales != 0:
            scale_columns(
                scores, num_rows, F32 * KEYS, tile, table, low, high, value_scales, scale_stride, block_size
            )
        gather_values(
            value_panels, KEYS, element, values, table, low, high, tile, head_dim, block_size, block_bytes
        )
        _multiply_rows(
            acc, acc_stride, scores + F32 * (low - tile), F32 * KEYS, value_panels + PANEL_ROW * (low - tile),
            PANEL_ROW * KEYS, acc, acc_stride, PANEL_ROW, num_rows, num_panels, high - low,
        )  # fmt: skip

    _store_tile(out, num_kv_heads * group * head_dim, acc, acc_stride, stats, num_tokens, group, head_dim)


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

    padded = (head_dim + PANEL - 1) // PANEL * PANEL
    scratch_size = (
        num_tokens_per_tile * group * (padded + 2 + head_dim + KEYS) + KEYS * (padded + head_dim) + PANEL
    )
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
