"""Attention of one tile of queries over its row's keys, tile by tile with an online softmax.

A tile holds the queries of some tokens for one KV head, token by token and, within a token, head by head; it
meets the keys in tiles counted from key 0. So what a token gets depends neither on its batch nor on how a prompt
was cut into chunks.
"""

from __future__ import annotations

import numpy as np
import torch

from kernels import cpu_vector as vector
from kernels.cpu_attention_panels import PANEL_ROW, gather_keys, gather_values
from kernels.cpu_element import size_of
from kernels.cpu_jit import f32_pointer, jit
from kernels.cpu_matmul_tile import MOST_ROWS, PANEL, multiply_tile
from kernels.cpu_row import (
    F32,
    LOG2_E,
    ONE,
    VECTOR,
    ZERO,
    cap_scores,
    fill,
    max_of,
    scale_columns,
    store_scaled,
    weigh,
)

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
def attend_tile(
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
    panels,  # a slot per tile of keys that may be held, and one for all the others
    num_slots,
    num_held,  # so many tiles of keys, from key 0 on, lie in their slots already
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
    """Attention of one tile of queries. Returns how many tiles of keys, from key 0 on, now lie in their slots."""
    num_rows = num_tokens * group
    block_bytes = size_of(element) * num_kv_heads * block_size * head_dim
    scale_stride = F32 * num_kv_heads * block_size
    acc_stride = F32 * _padded(head_dim)
    acc = scratch
    zeros = acc + num_rows * acc_stride
    scores = zeros + PANEL_ROW
    q = scores + F32 * num_rows * KEYS
    stats = q + F32 * num_rows * head_dim

    fill(acc, (scores - acc) // F32, ZERO)
    _load_queries(q, query, query_token_stride, query_head_stride, num_tokens, group, head_dim, query_scale)
    for r in range(num_rows):
        f32_pointer(stats)[2 * r], f32_pointer(stats)[2 * r + 1] = HIDDEN, ZERO

    begin, end = max(0, position + 1 - window) if window > 0 else 0, position + num_tokens
    for tile in range(begin // KEYS * KEYS, end, KEYS):
        low, high = max(begin, tile), min(end, tile + KEYS)
        slot = min(tile // KEYS, num_slots - 1)
        key_panels = panels + slot * slot_bytes(head_dim)
        value_panels = key_panels + F32 * KEYS * head_dim
        if slot >= num_held:
            if (
                high - low < KEYS
            ):  # what lies in the other columns may be slow to multiply with: numbers next to zero
                fill(key_panels, KEYS * head_dim, ZERO)
            gather_keys(key_panels, element, keys, table, low, high, tile, head_dim, block_size, block_bytes)
            gather_values(
                value_panels, KEYS, element, values, table, low, high, tile, head_dim, block_size, block_bytes
            )
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
        _multiply_rows(
            acc, acc_stride, scores + F32 * (low - tile), F32 * KEYS, value_panels + PANEL_ROW * (low - tile),
            PANEL_ROW * KEYS, acc, acc_stride, PANEL_ROW, num_rows, _padded(head_dim) // PANEL,
            high - low,
        )  # fmt: skip

    _store_tile(out, num_kv_heads * group * head_dim, acc, acc_stride, stats, num_tokens, group, head_dim)
    return min(end // KEYS, num_slots - 1) if begin == 0 else 0


@jit
def slot_bytes(head_dim):
    """The panels of a tile of keys, and of their values."""
    return F32 * KEYS * (head_dim + _padded(head_dim))


@jit
def clear_slots(panels, num_slots, head_dim):
    """Values' panels end in zeros, which gathering leaves alone."""
    if _padded(head_dim) != head_dim:
        fill(panels, num_slots * slot_bytes(head_dim) // F32, ZERO)


@jit
def tile_bytes(num_rows, head_dim):
    """What `attend_tile` needs beside its panels, in whole cache lines."""
    numbers = num_rows * (_padded(head_dim) + 2 + head_dim + KEYS) + PANEL
    return (F32 * numbers + VECTOR - 1) // VECTOR * VECTOR


@jit
def _padded(head_dim):
    return (head_dim + PANEL - 1) // PANEL * PANEL
