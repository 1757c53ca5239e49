"""Attention of one tile of queries over its row's keys, tile by tile with an online softmax.

A tile holds the queries of some tokens for one KV head, ordered by token, then by head. Tiles of keys are
counted from key 0. A token's result therefore depends neither on its batch nor on the prompt's chunk
boundaries.

If matmuls round their rows to 16 or 8 bits, the cache holds bfloat16 or int8, and the CPU multiplies bfloat16
natively, tiles do the same: they round queries and attention weights. Scores, sums and the softmax stay fp32.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from pagemill.kernels.cpu.attention.operands import first_visible
from pagemill.kernels.cpu.attention.panels import (
    PANEL_ROW,
    gather_keys,
    gather_scales,
    gather_values,
    pair_rows,
)
from pagemill.kernels.cpu.jit import vector
from pagemill.kernels.cpu.jit.compiler import f32_pointer, jit
from pagemill.kernels.cpu.jit.element import is_rounding
from pagemill.kernels.cpu.jit.row import (
    F32,
    LOG2_E,
    ONE,
    VECTOR,
    ZERO,
    cap_vector,
    fill,
    sink_weight,
    store_scaled,
)
from pagemill.kernels.cpu.matmul import bf16_tile
from pagemill.kernels.cpu.matmul.bf16_rows import round_lines
from pagemill.kernels.cpu.matmul.fp32_tile import MOST_ROWS, PANEL, multiply_lined_tile

KEYS = 4 * vector.LANES  # columns of a tile
LINES = KEYS // vector.LANES  # in a row of scores
HIDDEN = np.float32(-1e30)  # a masked score; finite, so that the difference of two is defined
LOWEST = np.float32(-np.inf)


@jit
def _num_parts(num_rows):
    """Number of register tiles in a tile of queries. Queries and scores are stored in lines, part by part."""
    return (num_rows + MOST_ROWS - 1) // MOST_ROWS


@jit
def _rows_of(part, num_rows):
    num_parts = _num_parts(num_rows)
    return num_rows * part // num_parts, num_rows * (part + 1) // num_parts


@jit
def _multiply(
    is_paired, count, out, out_stride, out_half, start, start_stride, start_half, x, panel, num_lines
):
    """Multiply a tile of lines by a panel: both fp32, or both pairs (`_pair_up`).

    `num_lines` counts fp32 lines.
    """
    # The complete panel is in cache, so it is not prefetched.
    if is_paired:
        bf16_tile.multiply_lined_tile(
            count,
            out,
            out_stride,
            out_half,
            start,
            start_stride,
            start_half,
            x,
            panel,
            num_lines // 2,
            panel,
            0,
        )
    else:
        multiply_lined_tile(
            count, out, out_stride, out_half, start, start_stride, start_half, x, panel, num_lines, panel, 0
        )


@jit
def _pair_up(lines, num_rows, num_lines):
    """Round rows to bfloat16 in place. Within each part, every two lines of a row become one."""
    for part in range(_num_parts(num_rows)):
        first, last = _rows_of(part, num_rows)
        count, base = last - first, lines + VECTOR * num_lines * first
        for line in range(0, num_lines, 2):  # writes stay behind the data still to be read
            for row in range(count):
                low = base + VECTOR * (line * count + row)
                round_lines(low, low + VECTOR * count, base + VECTOR * (line // 2 * count + row))


@jit
def _score(is_paired, scores, q, key_panels, num_rows, depth, zeros, first_panel, end_panel):
    """scores = q @ keys, for the columns of some panels and every row.

    `depth` is that of the panels, `zeros` the address of a zero vector.
    """
    num_parts, num_lines = _num_parts(num_rows), depth // vector.LANES
    for panel in range(first_panel, end_panel):
        keys = key_panels + PANEL_ROW * depth * panel
        for part in range(num_parts):
            first, last = _rows_of(part, num_rows)
            line = VECTOR * (last - first)
            _multiply(
                is_paired,
                last - first,
                scores + VECTOR * LINES * first + 2 * line * panel,
                VECTOR,
                line,
                zeros,
                0,
                0,
                q + VECTOR * num_lines * first,
                keys,
                num_lines,
            )


@jit
def _add_values(is_paired, acc, acc_stride, scores, value_panels, num_rows, num_panels, first_line, end_line):
    """acc += weights @ values, over lines first_line .. end_line - 1 of `scores`, which now hold weights."""
    num_parts, first_row, place = _num_parts(num_rows), vector.LANES * first_line, first_line
    if is_paired:  # complete pairs of lines, half as many
        first_line, end_line = first_line // 2 * 2, (end_line + 1) // 2 * 2
        first_row, place = vector.LANES * first_line // 2, first_line // 2
    for panel in range(num_panels):
        values = value_panels + PANEL_ROW * (KEYS * panel + first_row)
        for part in range(num_parts):
            first, last = _rows_of(part, num_rows)
            target = acc + acc_stride * first + PANEL_ROW * panel
            _multiply(
                is_paired,
                last - first,
                target,
                acc_stride,
                VECTOR,
                target,
                acc_stride,
                VECTOR,
                scores + VECTOR * (LINES * first + (last - first) * place),
                values,
                end_line - first_line,
            )


@jit(exact=True)
def _prepare_row(row, line, num_lines, first_visible, first_hidden, distance, slope, softcap, key_scales):
    """Scale, cap, bias and mask a row's scores. The row's lines are `line` bytes apart.

    `distance` is the position of the first key relative to the query.
    """
    visible, hidden = vector.splat(np.float32(first_visible)), vector.splat(np.float32(first_hidden))
    for i in range(num_lines):
        numbers = vector.load(row + line * i)
        offset = np.float32(vector.LANES * i)
        if key_scales != 0:
            numbers = vector.multiply(numbers, vector.load(key_scales + VECTOR * i))
        if softcap > ZERO:
            numbers = cap_vector(numbers, softcap)
        if slope != ZERO:  # distance from the query: smaller rounding error, and softmax cancels the constant
            distances = vector.count_from(distance + offset)
            numbers = vector.multiply_add(vector.splat(slope), distances, numbers)
        columns = vector.count_from(offset)
        numbers = vector.keep(numbers, columns, visible, hidden, vector.splat(HIDDEN))
        vector.store(row + line * i, numbers)


@jit(exact=True)
def _softmax_part(scores, num_rows, stats, acc, acc_stride, value_scales, work, is_half):
    """Turn the scores of a part's rows into weights, and rescale the rows' accumulators.

    With `is_half`, all keys of the second half of the lines are hidden, and those lines are not touched.
    `stats` [2, LANES] holds the rows' maxima and sums; `work` is the address of LANES + 1 vectors. Rows share
    the reductions over lanes, because separate reductions would each wait for the previous result.
    """
    line, totals, factors = VECTOR * num_rows, stats + VECTOR, work + VECTOR * vector.LANES
    for r in range(num_rows):
        at = scores + VECTOR * r
        low = vector.maximum(vector.load(at), vector.load(at + line))
        if is_half:
            vector.store(work + VECTOR * r, low)
        else:
            high = vector.maximum(vector.load(at + 2 * line), vector.load(at + 3 * line))
            vector.store(work + VECTOR * r, vector.maximum(low, high))
    old = vector.load(stats)
    new = vector.maximum(vector.max_of_each(work), old)
    vector.store(stats, new)
    # Exactly 1 if the maximum is unchanged: a tile whose keys are all hidden from a row has no effect on it.
    powers, lowest = vector.exp2(vector.subtract(old, new)), vector.splat(LOWEST)
    vector.store(factors, vector.keep(powers, old, lowest, new, vector.splat(ONE)))
    for r in range(num_rows):
        at_a = scores + VECTOR * r
        at_b, at_c, at_d = at_a + line, at_a + 2 * line, at_a + 3 * line
        largest = f32_pointer(stats)[r]
        shift = vector.splat(
            largest if largest != LOWEST else ZERO
        )  # all keys so far are hidden: their weight is 0
        a = vector.exp2(vector.subtract(vector.load(at_a), shift))
        b = vector.exp2(vector.subtract(vector.load(at_b), shift))
        sums = vector.add(a, b)
        if value_scales != 0:
            a = vector.multiply(a, vector.load(value_scales))
            b = vector.multiply(b, vector.load(value_scales + VECTOR))
        vector.store(at_a, a)
        vector.store(at_b, b)
        if not is_half:
            c = vector.exp2(vector.subtract(vector.load(at_c), shift))
            d = vector.exp2(vector.subtract(vector.load(at_d), shift))
            sums = vector.add(sums, vector.add(c, d))
            if value_scales != 0:
                c = vector.multiply(c, vector.load(value_scales + 2 * VECTOR))
                d = vector.multiply(d, vector.load(value_scales + 3 * VECTOR))
            vector.store(at_c, c)
            vector.store(at_d, d)
        vector.store(work + VECTOR * r, sums)
        factor = f32_pointer(factors)[r]
        if factor != ONE:
            _rescale(acc + acc_stride * r, acc_stride, factor)
    kept = vector.multiply(vector.load(totals), vector.load(factors))
    vector.store(totals, vector.add(kept, vector.sum_of_each(work)))


@jit(exact=True)
def _rescale(acc, size, factor):
    factors = vector.splat(factor)
    for at in range(acc, acc + size, VECTOR):
        vector.store(at, vector.multiply(vector.load(at), factors))


@jit
def _softmax_tile(
    room, num_rows, first_key, position, group, rules, key_scales, value_scales, acc_stride, is_half
):
    """Mask, bias and weigh one tile of scores.

    `position` is that of the first token. Scales are addresses of the tile's scales, or 0.
    """
    for part in range(_num_parts(num_rows)):
        first, last = _rows_of(part, num_rows)
        rows = room.scores + VECTOR * LINES * first
        for r in range(first, last):
            query = position + r // group
            first_seen = first_visible(rules.window, query)
            first_hidden = query + 1
            if (
                first_seen > first_key
                or first_hidden < first_key + KEYS
                or rules.slopes != 0
                or rules.softcap > ZERO
                or key_scales != 0
            ):
                _prepare_row(
                    rows + VECTOR * (r - first),
                    VECTOR * (last - first),
                    LINES // 2 if is_half else LINES,
                    first_seen - first_key,
                    first_hidden - first_key,
                    np.float32(first_key - query),
                    LOG2_E * f32_pointer(rules.slopes)[r % group] if rules.slopes != 0 else ZERO,
                    rules.softcap,
                    key_scales,
                )
        stat, acc = room.stats + 2 * VECTOR * part, room.acc + acc_stride * first
        _softmax_part(rows, last - first, stat, acc, acc_stride, value_scales, room.work, is_half)


@jit
def _load_queries(q, queries, num_rows, head_dim, scale):
    """Store the queries times `scale` in lines, part by part, and pad each row's last line with zeros."""
    num_parts, num_lines, factor = _num_parts(num_rows), _depth(head_dim) // vector.LANES, vector.splat(scale)
    group = queries.group
    for part in range(num_parts):
        first, last = _rows_of(part, num_rows)
        for r in range(first, last):
            source = queries.query + F32 * (
                r // group * queries.token_stride + r % group * queries.head_stride
            )
            target = q + VECTOR * (num_lines * first + r - first)
            for line in range(head_dim // vector.LANES):
                numbers = vector.multiply(vector.load(source + VECTOR * line), factor)
                vector.store(target + VECTOR * (last - first) * line, numbers)
            rest = head_dim % vector.LANES
            if rest > 0:
                target += VECTOR * (last - first) * (num_lines - 1)
                fill(target, vector.LANES, ZERO)
                store_scaled(target, source + F32 * (head_dim - rest), rest, scale)


@jit
def _store_tile(queries, cache, room, num_rows, acc_stride, sinks):
    group, head_dim = queries.group, cache.head_dim
    token_stride = cache.num_kv_heads * group * head_dim
    for part in range(_num_parts(num_rows)):
        first, last = _rows_of(part, num_rows)
        maxima = f32_pointer(room.stats + 2 * VECTOR * part)
        totals = f32_pointer(room.stats + 2 * VECTOR * part + VECTOR)
        for r in range(first, last):
            target = queries.out + F32 * (r // group * token_stride + r % group * head_dim)
            total = totals[r - first] + sink_weight(sinks, r % group, maxima[r - first])
            store_scaled(target, room.acc + r * acc_stride, head_dim, ONE / total)


class _Room(NamedTuple):
    """Scratch memory of a tile of queries."""

    acc: int  # [num_rows, padded head_dim]
    zeros: int  # a zero vector
    scores: int  # [num_rows, KEYS], in lines
    q: int  # [num_rows, depth], in lines
    key_factors: int  # [KEYS]
    value_factors: int  # likewise
    work: int  # of `_softmax_part`
    stats: int  # likewise, part by part


@jit
def _room_in(scratch, num_rows, head_dim):
    """Clear and lay out the scratch memory."""
    zeros = scratch + F32 * num_rows * _padded(head_dim)
    scores = zeros + VECTOR
    q = scores + F32 * num_rows * KEYS
    key_factors = q + F32 * num_rows * _depth(head_dim)
    value_factors = key_factors + F32 * KEYS
    work = value_factors + F32 * KEYS
    stats = work + VECTOR * (vector.LANES + 1)
    fill(scratch, (scores - scratch) // F32, ZERO)
    fill(key_factors, (stats - key_factors) // F32, ONE)
    for part in range(_num_parts(num_rows)):
        vector.store(stats + 2 * VECTOR * part, vector.splat(HIDDEN))
        vector.store(stats + 2 * VECTOR * part + VECTOR, vector.splat(ZERO))
    return _Room(scratch, zeros, scores, q, key_factors, value_factors, work, stats)


@jit
def _gather(is_paired, panels, cache, table, low, high, tile, num_there):
    """Fill the panels of a tile's keys and values from keys low .. high - 1.

    The first `num_there` keys of the tile are already in place, followed by zeros.
    """
    head_dim, depth = cache.head_dim, _depth(cache.head_dim)
    values = panels + F32 * KEYS * depth
    if num_there:
        low = max(low, tile + num_there)
    # Other columns may hold NaN or denormals, which are slow to multiply, so clear them.
    elif high - low < KEYS:
        fill(panels, slot_bytes(head_dim) // F32, ZERO)
    gather_keys(panels, depth, cache, table, low, high, tile)
    gather_values(values, KEYS, cache, table, low, high, tile)
    if is_paired:
        pair_rows(panels, KEYS // PANEL, depth)
        pair_rows(values, head_dim // PANEL, KEYS)


@jit
def attend_tile(
    queries,  # from the tile's first token and head
    cache,  # of its KV head
    table,
    rules,  # from its first head
    scratch,
    panels,  # one slot per tile of keys that may be held, and one for all others
    num_slots,
    num_held,  # number of keys, from key 0, that are already in their slots, followed by zeros
    num_tokens,
    position,  # of the first token
):
    """Attention of one tile of queries. Returns the number of keys, from key 0, now in their slots."""
    group, head_dim = queries.group, cache.head_dim
    num_rows, depth, acc_stride = num_tokens * group, _depth(head_dim), F32 * _padded(head_dim)
    # Only head sizes that fill their panels: packing leaves old data where other sizes need zeros.
    is_paired = bf16_tile.IS_NATIVE and is_rounding(cache.element) and head_dim % PANEL == 0
    room = _room_in(scratch, num_rows, head_dim)
    _load_queries(room.q, queries, num_rows, head_dim, rules.scale)
    if is_paired:
        _pair_up(room.q, num_rows, depth // vector.LANES)
    begin = max(0, first_visible(rules.window, position))
    end = position + num_tokens
    for tile in range(begin // KEYS * KEYS, end, KEYS):
        low, high = max(begin, tile), min(end, tile + KEYS)
        slot = min(tile // KEYS, num_slots - 1)
        key_panels = panels + slot * slot_bytes(head_dim)
        value_panels = key_panels + F32 * KEYS * depth
        num_there = max(0, num_held - tile)
        if tile + num_there < high:
            _gather(is_paired, key_panels, cache, table, low, high, tile, num_there)
        if cache.key_scales != 0:
            gather_scales(room.key_factors, cache.key_scales, cache, table, low, high, tile)
        if cache.value_scales != 0:
            gather_scales(room.value_factors, cache.value_scales, cache, table, low, high, tile)
        first_panel, end_panel = (low - tile) // PANEL, (high - tile + PANEL - 1) // PANEL
        _score(
            is_paired, room.scores, room.q, key_panels, num_rows, depth, room.zeros, first_panel, end_panel
        )
        _softmax_tile(
            room, num_rows, tile, position, group, rules, room.key_factors if cache.key_scales != 0 else 0,
            room.value_factors if cache.value_scales != 0 else 0, acc_stride, end_panel < KEYS // PANEL,
        )  # fmt: skip
        if is_paired:
            _pair_up(room.scores, num_rows, LINES)
        _add_values(
            is_paired, room.acc, acc_stride, room.scores, value_panels, num_rows, _padded(head_dim) // PANEL,
            (low - tile) // vector.LANES, (high - tile + vector.LANES - 1) // vector.LANES,
        )  # fmt: skip
    _store_tile(queries, cache, room, num_rows, acc_stride, rules.sinks)
    num_held = min(end, (num_slots - 1) * KEYS) if begin == 0 else 0
    return num_held // KEYS * KEYS if is_paired else num_held  # paired data cannot be extended


@jit
def slot_bytes(head_dim):
    """Bytes of the panels of one tile's keys and values."""
    return F32 * KEYS * (_depth(head_dim) + _padded(head_dim))


@jit
def clear_slots(panels, num_slots, head_dim):
    """Zero the panels' padding, which gathering does not write."""
    if _padded(head_dim) != head_dim:
        fill(panels, num_slots * slot_bytes(head_dim) // F32, ZERO)


@jit
def tile_bytes(num_rows, head_dim):
    """Bytes of scratch memory for `attend_tile` in addition to its panels, in complete cache lines."""
    num_vectors = 2 * LINES + vector.LANES + 2 + 2 * _num_parts(num_rows)
    return F32 * num_rows * (_padded(head_dim) + _depth(head_dim) + KEYS) + VECTOR * num_vectors


@jit
def _depth(head_dim):
    """Depth of the key panels, rounded up to complete vectors."""
    return (head_dim + vector.LANES - 1) // vector.LANES * vector.LANES


@jit
def _padded(head_dim):
    """Number of columns in the value panels."""
    return (head_dim + PANEL - 1) // PANEL * PANEL
