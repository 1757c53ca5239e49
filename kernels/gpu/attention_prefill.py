"""Paged attention for rows with several query tokens: new prompts, chunks of prompts, resumed requests.

One program handles one KV head and `block_m` consecutive pairs (query token, query head of the group). Every
key that it reads serves all pairs, and tiles are full regardless of the group's size. A program reads its
pairs from a work list. The host builds the list from known query lengths, so no program starts without work.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.attention_tile import (
    LOWEST_SCORE,
    SMALLEST_UNIT,
    attention_scores,
    first_visible,
    fold_tile,
    load_scales,
    load_slots,
    must_upcast,
    slot_offsets,
    with_sinks,
)
from pagemill.kernels.gpu.tuning import Tile, compute_capability, padded_head_dim, prefill_tile
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring
from pagemill.kernels.types.transfer import to_device


# Not specialized, because the value changes between steps: compiling another kernel would stall serving.
@triton.jit(do_not_specialize=["stride_table_row"])
def paged_attention_prefill_kernel(
    out_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    query_ptr,  # [num_tokens, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scales_ptr,  # fp32 [num_blocks, num_kv_heads, BLOCK_SIZE], or None
    value_scales_ptr,
    block_tables_ptr,  # [num_rows, max_blocks] int32
    query_start_loc_ptr,  # [num_rows + 1] int32
    seq_lens_ptr,  # [num_rows] int32
    work_list_ptr,  # [num_programs, 2] int32: row, first pair (token * GROUP_SIZE + head of the group)
    alibi_slopes_ptr,  # [num_heads] fp32 or None
    sinks_ptr,  # likewise
    scale,
    stride_query_token,
    stride_query_head,
    stride_cache_block,
    stride_cache_head,
    stride_table_row,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # of `first_visible`
    SOFTCAP: tl.constexpr,  # 0 = none
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    SCALED: tl.constexpr = key_scales_ptr is not None
    # bf16 is kept: here one conversion serves a tile's many rows, and registers are scarce.
    HALF: tl.constexpr = SCALED and query_ptr.dtype.element_ty == tl.float16
    row = tl.load(work_list_ptr + tl.program_id(0) * 2)
    first_pair = tl.load(work_list_ptr + tl.program_id(0) * 2 + 1)
    kv_head = tl.program_id(1)
    num_heads = tl.num_programs(1) * GROUP_SIZE

    query_start = tl.load(query_start_loc_ptr + row)
    query_len = tl.load(query_start_loc_ptr + row + 1) - query_start
    context_len = tl.load(seq_lens_ptr + row) - query_len

    pairs = first_pair + tl.arange(0, BLOCK_M)
    tokens = pairs // GROUP_SIZE
    heads = kv_head * GROUP_SIZE + pairs % GROUP_SIZE
    is_query = tokens < query_len
    query_positions = context_len + tokens
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_element = is_query[:, None] & (dims < HEAD_DIM)[None, :]
    query_rows = (query_start + tokens).to(tl.int64)
    query = tl.load(
        query_ptr
        + query_rows[:, None] * stride_query_token
        + heads[:, None] * stride_query_head
        + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    if UPCAST and not HALF:
        query = query.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=is_query, other=0.0)
    else:
        slopes = tl.zeros([BLOCK_M], tl.float32)

    # Keys 0..end are visible to the tile's last token, keys below `full_end` to all of its tokens.
    first_position = context_len + first_pair // GROUP_SIZE
    end = context_len + tl.minimum((first_pair + BLOCK_M - 1) // GROUP_SIZE, query_len - 1) + 1
    start = 0
    full_end = (first_position + 1) // BLOCK_N * BLOCK_N
    if SLIDING_WINDOW != 0:
        start = tl.maximum(first_visible(SLIDING_WINDOW, first_position), 0) // BLOCK_N * BLOCK_N
        full_end = start  # both ends of the window cross tiles, so mask all tiles

    table_ptr = block_tables_ptr + row.to(tl.int64) * stride_table_row
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    key_scales = tl.full([BLOCK_N], 1.0, tl.float32)
    value_scales = key_scales
    lanes = tl.arange(0, BLOCK_N)
    maximum = tl.full([BLOCK_M], LOWEST_SCORE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    unit = tl.full([1], SMALLEST_UNIT, tl.float32)
    for tile_start in range(start, full_end, BLOCK_N):
        offsets = slot_offsets(
            table_ptr, tile_start, None, stride_cache_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM, False
        )
        keys = load_slots(key_ptr, offsets, None, HEAD_DIM, HEAD_DIM_PADDED, False)
        if SCALED:
            key_scales = load_scales(key_scales_ptr, kv_head, offsets, None, BLOCK_SIZE, HEAD_DIM, False)
        distances = (tile_start + lanes)[None, :] - query_positions[:, None]
        scores = attention_scores(
            query, keys, key_scales, distances, slopes, scale, SCALED, HAS_ALIBI, SOFTCAP
        )
        values = load_slots(value_ptr, offsets, None, HEAD_DIM, HEAD_DIM_PADDED, False)
        if SCALED:
            value_scales = load_scales(value_scales_ptr, kv_head, offsets, None, BLOCK_SIZE, HEAD_DIM, False)
        maximum, total, output, unit = fold_tile(
            maximum, total, output, unit, scores, values, value_scales, query.dtype, SCALED, HALF
        )

    for tile_start in range(full_end, end, BLOCK_N):
        positions = tile_start + lanes
        readable = positions < end
        if SLIDING_WINDOW != 0:
            readable = readable & (positions >= first_visible(SLIDING_WINDOW, first_position))
        offsets = slot_offsets(
            table_ptr, tile_start, readable, stride_cache_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM, True
        )
        keys = load_slots(key_ptr, offsets, readable, HEAD_DIM, HEAD_DIM_PADDED, True)
        if SCALED:
            key_scales = load_scales(key_scales_ptr, kv_head, offsets, readable, BLOCK_SIZE, HEAD_DIM, True)
        distances = positions[None, :] - query_positions[:, None]
        scores = attention_scores(
            query, keys, key_scales, distances, slopes, scale, SCALED, HAS_ALIBI, SOFTCAP
        )
        visible = distances <= 0
        if SLIDING_WINDOW > 0:  # by distances, which are already in registers; there are no spare registers
            visible = visible & (distances > -SLIDING_WINDOW)
        if SLIDING_WINDOW < 0:
            visible = visible & (
                positions[None, :] >= first_visible(SLIDING_WINDOW, query_positions)[:, None]
            )
        scores = tl.where(visible, scores, float("-inf"))
        values = load_slots(value_ptr, offsets, readable, HEAD_DIM, HEAD_DIM_PADDED, True)
        if SCALED:
            value_scales = load_scales(
                value_scales_ptr, kv_head, offsets, readable, BLOCK_SIZE, HEAD_DIM, True
            )
        maximum, total, output, unit = fold_tile(
            maximum, total, output, unit, scores, values, value_scales, query.dtype, SCALED, HALF
        )

    if sinks_ptr is not None:
        total = with_sinks(total, maximum, sinks_ptr, heads, is_query)
    if HALF:
        output = output * unit
    # The window may hide all keys from pairs past the row's last token: use any divisor except 0.
    output = output / tl.where(is_query, total, 1.0)[:, None]
    tl.store(
        out_ptr + (query_rows[:, None] * num_heads + heads[:, None]) * HEAD_DIM + dims[None, :],
        output.to(out_ptr.dtype.element_ty),
        mask=is_element,
    )


def build_work_list(
    query_lens: Sequence[int], seq_lens: Sequence[int], first_row: int, group_size: int, block_m: int
) -> npt.NDArray[np.int32]:
    """[num_programs, 2]: the (row, first pair) of every program, for rows from `first_row`.

    Longest work first, because a long tile that starts last leaves the rest of the device idle. Rows without
    tokens (padding) do not get a program.
    """
    rows = np.arange(first_row, len(query_lens), dtype=np.int64)
    pairs = np.asarray(query_lens[first_row:], dtype=np.int64) * group_size
    lengths = np.asarray(seq_lens[first_row:], dtype=np.int64)
    tiles = np.where(lengths > 0, -(-pairs // block_m), 0)
    row_of_tile = np.repeat(np.arange(len(rows)), tiles)
    tile_in_row = np.arange(len(row_of_tile)) - np.repeat(np.cumsum(tiles) - tiles, tiles)
    first_pair = tile_in_row * block_m
    keys_read = lengths[row_of_tile] - (pairs[row_of_tile] - first_pair) // group_size
    order = np.argsort(-keys_read, kind="stable")
    return np.stack([rows[row_of_tile[order]], first_pair[order]], axis=1).astype(np.int32)


def _work_list(
    metadata: AttentionMetadata, group_size: int, block_m: int, device: torch.device
) -> torch.Tensor:
    key = (group_size, block_m)
    if key not in metadata.work_lists:
        array = build_work_list(
            metadata.query_lens_host, metadata.seq_lens_host, metadata.num_decode_rows, group_size, block_m
        )
        metadata.work_lists[key] = to_device(array, device)
    return metadata.work_lists[key]


def paged_attention_prefill(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: LayerCache,
    metadata: AttentionMetadata,
    scoring: Scoring,
    *,
    tile: Tile | None = None,
) -> None:
    """Causal attention of every row after `metadata.num_decode_rows`, written to `out`.

    Args:
        out: [num_tokens, num_heads, head_dim], contiguous. Other tokens are not written.
        query: [num_tokens, num_heads, head_dim] of the complete step, last dimension contiguous.
        tile: overrides `tuning`.
    """
    num_heads, head_dim = query.shape[1:]
    num_kv_heads, block_size = cache.num_kv_heads, cache.block_size
    group_size = num_heads // num_kv_heads
    tile = tile or prefill_tile(
        head_dim, query.element_size(), compute_capability(query.device), is_scaled=cache.is_scaled
    )
    assert out.is_contiguous()
    work_list = _work_list(metadata, group_size, tile.block_m, query.device)
    if len(work_list) == 0:
        return
    paged_attention_prefill_kernel[(len(work_list), num_kv_heads)](
        out,
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        metadata.block_tables,
        metadata.query_start_loc,
        metadata.seq_lens,
        work_list,
        scoring.alibi_slopes,
        scoring.sinks,
        scoring.scale,
        query.stride(0),
        query.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        metadata.block_tables.stride(0),
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=scoring.sliding_window or 0,
        SOFTCAP=scoring.softcap or 0.0,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        UPCAST=must_upcast(query, cache),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # off by default since Triton 3.10; multiply-adds here should use FMAs
    )
