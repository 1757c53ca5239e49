"""Attention of rows with many query tokens over the paged cache, distributed over threads.

Consecutive tiles of queries often read the same keys: they belong to one row, or to rows whose prompts start
with the same blocks. The panels of the first keys are gathered once for all of them.
"""

from __future__ import annotations

import numpy as np

from pagemill.kernels.cpu.attention.operands import (
    Paged,
    Queries,
    Tables,
    first_visible,
    of_head,
    of_kv_head,
    of_token,
    rules_of,
    table_of,
)
from pagemill.kernels.cpu.attention.panels import num_common_blocks
from pagemill.kernels.cpu.attention.tile import KEYS, attend_tile, clear_slots, slot_bytes, tile_bytes
from pagemill.kernels.cpu.jit.compiler import external, i32_pointer, jit
from pagemill.kernels.cpu.jit.row import F32, VECTOR, ZERO, fill, line_in
from pagemill.kernels.cpu.jit.threads import launch
from pagemill.kernels.cpu.matmul.work_sharing import new_counter, plan_turns, take

QUERIES = 48
"""Maximum rows of a tile, unless one token has more. Queries, scores and results then fit the L1 cache."""
HELD_BYTES = 512 * 1024
"""Maximum number of panel bytes kept between tiles of queries: half of a core's L2 cache."""


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


@jit(allocates=True)
def _plan_costs(tiles, num_tiles, num_kv_heads, group, window):
    """Return the cost of the first n tasks, for every n. A task is one tile for one KV head, head by head."""
    costs = np.zeros(num_tiles * num_kv_heads + 1, np.int64)
    for task in range(num_tiles * num_kv_heads):
        _, _, count, position = tiles[task % num_tiles]
        visible = position + count - max(0, first_visible(window, position))
        costs[task + 1] = costs[task] + (count * group + 8) * (visible + 8)
    return costs


@jit
def _num_slots(tiles, num_tiles, head_dim):
    """Number of slots: one per tile of keys that can be held, and one for all others."""
    longest = 0
    for tile in range(num_tiles):
        longest = max(longest, tiles[tile, 2] + tiles[tile, 3])
    return min(longest // KEYS, HELD_BYTES // slot_bytes(head_dim)) + 1


@jit
def _num_held(num_held, held_row, row, num_keys, tables, block_size):
    """Number of keys in `held_row`'s slots that `row` shares, in complete tiles."""
    num_blocks = (min(num_held, num_keys) + block_size - 1) // block_size
    num_common = num_common_blocks(table_of(tables, row), table_of(tables, held_row), num_blocks)
    return min(num_held, num_common * block_size) // KEYS * KEYS


@jit
def _attend_tiles(
    thread,
    tiles,
    num_tiles,
    turns,  # tasks turns[i] .. turns[i + 1] - 1 are taken together
    counter,
    num_slots,
    memory,  # of all threads
    thread_bytes,
    queries,
    cache,
    tables,
    rules,
):
    """Run one thread's tasks, head by head, so that consecutive tiles often read the same keys."""
    panels = line_in(memory) + thread * thread_bytes
    scratch = panels + num_slots * slot_bytes(cache.head_dim)
    clear_slots(panels, num_slots, cache.head_dim)
    held_head, held_row, num_held = -1, 0, 0
    turn = take(line_in(counter))
    while turn < len(turns) - 1:
        for task in range(turns[turn], turns[turn + 1]):
            row, token, count, position = tiles[task % num_tiles]
            kv_head = task // num_tiles
            if kv_head != held_head:
                num_held = 0
            elif row != held_row:
                num_held = _num_held(num_held, held_row, row, position + count, tables, cache.block_size)
            head = kv_head * queries.group
            num_held = attend_tile(
                of_token(queries, token, head, cache), of_kv_head(cache, kv_head), table_of(tables, row),
                of_head(rules, head), scratch, panels, num_slots, num_held, count, position,
            )  # fmt: skip
            held_head, held_row = kv_head, row
        turn = take(line_in(counter))


@external(allocates=True)
def prefill(
    out,  # [num_tokens, num_kv_heads * group, head_dim]
    query,  # the same shape, with strides
    query_token_stride,
    query_head_stride,
    element,  # of the caches
    key_cache,
    value_cache,
    key_scales,  # address 0 = the caches have no scales
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
    window,  # of `first_visible`
    softcap,  # 0 = none
    alibi_slopes,  # address 0 = none
    sinks,  # likewise
    num_threads,
):
    """Attention of rows first_row .. num_rows - 1, each with any number of query tokens."""
    queries = Queries(out, query, query_token_stride, query_head_stride, group)
    cache = Paged(
        element, key_cache, value_cache, key_scales, value_scales, num_kv_heads, head_dim, block_size
    )
    num_tokens_per_tile = max(1, QUERIES // group)
    tiles = np.empty((num_rows - first_row + num_tokens // num_tokens_per_tile, 4), np.int64)
    num_tiles = _plan_tiles(
        tiles, out, i32_pointer(query_start_loc), i32_pointer(seq_lens), first_row, num_rows, num_tokens_per_tile,
        num_kv_heads * group * head_dim,
    )  # fmt: skip
    turns = plan_turns(_plan_costs(tiles, num_tiles, num_kv_heads, group, window), num_threads)
    counter = new_counter()
    num_slots = _num_slots(tiles, num_tiles, head_dim)
    thread_bytes = num_slots * slot_bytes(head_dim) + tile_bytes(num_tokens_per_tile * group, head_dim)
    memory = np.empty(num_threads * thread_bytes + VECTOR, np.uint8)
    arguments = (
        tiles, num_tiles, turns, counter, num_slots, memory, thread_bytes, queries, cache,
        Tables(block_tables, block_table_stride), rules_of(scale, window, softcap, alibi_slopes, sinks),
    )  # fmt: skip
    launch(_attend_tiles, num_threads, arguments)
