"""Paged attention for rows with one query token: split over the KV length, then merged.

One program handles one row, one KV head with all its query heads (they share every key that is read), and one
split of the row's keys. Host values determine the grid. Each row's splits are computed from `seq_lens` on the
device, so that a captured CUDA graph works for rows of any length.
"""

from __future__ import annotations

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
    to_half,
    with_sinks,
)
from pagemill.kernels.gpu.tuning import (
    LAUNCHES,
    Splits,
    Tile,
    compute_capability,
    decode_splits,
    decode_tile,
    multiprocessors,
    padded_head_dim,
)
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.scoring import Scoring

# Partial results that the merge kernel reads together; rows rarely have more. It is a constant, so that a
# step with another number of splits does not compile another kernel.
_MERGE = LAUNCHES["merge_splits"]


@triton.jit
def _split_plan(seq_len, num_splits, min_split, BLOCK_N: tl.constexpr, SLIDING_WINDOW: tl.constexpr):
    """(first key, keys per split) of a row; both are multiples of BLOCK_N.

    The split and merge kernels both call this, because they must agree on a row's number of splits.
    """
    first = 0
    if SLIDING_WINDOW != 0:
        position = tl.maximum(seq_len - 1, 0)
        first = tl.maximum(first_visible(SLIDING_WINDOW, position), 0) // BLOCK_N * BLOCK_N
    even = tl.cdiv(tl.cdiv(seq_len - first, num_splits), BLOCK_N) * BLOCK_N
    return first, tl.maximum(even, min_split)


# Not specialized, because the value changes between steps: compiling another kernel would stall serving.
@triton.jit(do_not_specialize=["stride_table_row", "min_split"])
def paged_attention_decode_kernel(
    out_ptr,  # [num_rows, num_heads, HEAD_DIM]
    partial_ptr,  # fp32 [num_rows, num_heads, num_splits, HEAD_DIM]; like the next, unused unless SPLIT
    lse_ptr,  # fp32 [num_rows, num_heads, num_splits], base 2
    query_ptr,  # [num_rows, num_heads, HEAD_DIM]
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scales_ptr,  # fp32 [num_blocks, num_kv_heads, BLOCK_SIZE], or None
    value_scales_ptr,
    block_tables_ptr,  # [num_rows, max_blocks] int32
    seq_lens_ptr,  # [num_rows] int32
    alibi_slopes_ptr,  # [num_heads] fp32 or None
    sinks_ptr,  # likewise
    scale,
    stride_query_row,
    stride_query_head,
    stride_cache_block,
    stride_cache_head,
    stride_table_row,
    min_split,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,  # of `first_visible`
    SOFTCAP: tl.constexpr,  # 0 = none
    SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    UPCAST: tl.constexpr,
):
    HEAD_TILES: tl.constexpr = (GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    HAS_ALIBI: tl.constexpr = alibi_slopes_ptr is not None
    SCALED: tl.constexpr = key_scales_ptr is not None
    HALF: tl.constexpr = SCALED and query_ptr.dtype.element_ty.primitive_bitwidth == 16
    row = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1) // HEAD_TILES
    split = tl.program_id(2)
    num_splits = tl.num_programs(2)
    num_heads = tl.num_programs(1) // HEAD_TILES * GROUP_SIZE

    seq_len = tl.load(seq_lens_ptr + row)
    first, split_tokens = _split_plan(seq_len, num_splits, min_split, BLOCK_N, SLIDING_WINDOW)
    start = first + split * split_tokens
    end = tl.minimum(start + split_tokens, seq_len)
    if start >= end:  # a padded row, or a split beyond this row's keys: merge never reads it
        return

    in_group = tl.program_id(1) % HEAD_TILES * BLOCK_M + tl.arange(0, BLOCK_M)
    is_head = in_group < GROUP_SIZE
    heads = kv_head * GROUP_SIZE + in_group
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_element = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    query = tl.load(
        query_ptr + row * stride_query_row + heads[:, None] * stride_query_head + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    if HALF:
        query, factors = to_half(query)
        scale = scale * factors[:, None]
    elif UPCAST:
        query = query.to(tl.float32)
    if HAS_ALIBI:
        slopes = tl.load(alibi_slopes_ptr + heads, mask=is_head, other=0.0)
    else:
        slopes = tl.zeros([BLOCK_M], tl.float32)

    table_ptr = block_tables_ptr + row * stride_table_row
    key_ptr = key_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    value_ptr = value_cache_ptr + kv_head.to(tl.int64) * stride_cache_head
    key_scales = tl.full([BLOCK_N], 1.0, tl.float32)
    value_scales = key_scales
    lanes = tl.arange(0, BLOCK_N)
    maximum = tl.full([BLOCK_M], LOWEST_SCORE, tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    output = tl.zeros([BLOCK_M, HEAD_DIM_PADDED], tl.float32)
    unit = tl.full([1], SMALLEST_UNIT, tl.float32)
    for tile_start in range(start, end, BLOCK_N):
        positions = tile_start + lanes
        visible = positions < end
        if SLIDING_WINDOW != 0:
            visible = visible & (positions >= first_visible(SLIDING_WINDOW, seq_len - 1))
        offsets = slot_offsets(
            table_ptr, tile_start, visible, stride_cache_block, BLOCK_SIZE, BLOCK_N, HEAD_DIM, True
        )
        keys = load_slots(key_ptr, offsets, visible, HEAD_DIM, HEAD_DIM_PADDED, True)
        if SCALED:
            key_scales = load_scales(key_scales_ptr, kv_head, offsets, visible, BLOCK_SIZE, HEAD_DIM, True)
        distances = (positions - (seq_len - 1))[None, :]
        scores = attention_scores(
            query, keys, key_scales, distances, slopes, scale, SCALED, HAS_ALIBI, SOFTCAP
        )
        scores = tl.where(visible[None, :], scores, float("-inf"))
        values = load_slots(value_ptr, offsets, visible, HEAD_DIM, HEAD_DIM_PADDED, True)
        if SCALED:
            value_scales = load_scales(
                value_scales_ptr, kv_head, offsets, visible, BLOCK_SIZE, HEAD_DIM, True
            )
        maximum, total, output, unit = fold_tile(
            maximum, total, output, unit, scores, values, value_scales, query.dtype, SCALED, HALF
        )

    if HALF:
        output = output * unit
    head_rows = row * num_heads + heads
    if SPLIT:  # noqa: SIM102 (the compiler decides this one)
        # Most rows of a large batch have one split: they are not merged, and their results are written only
        # once.
        if first + split_tokens < seq_len:
            partials = head_rows * num_splits + split
            part = output / total[:, None]
            tl.store(partial_ptr + partials[:, None] * HEAD_DIM + dims[None, :], part, mask=is_element)
            tl.store(lse_ptr + partials, maximum + tl.log2(total), mask=is_head)
            return  # sinks are added when the parts are merged
    if sinks_ptr is not None:
        total = with_sinks(total, maximum, sinks_ptr, heads, is_head)
    tl.store(
        out_ptr + head_rows[:, None] * HEAD_DIM + dims[None, :],
        (output / total[:, None]).to(out_ptr.dtype.element_ty),
        mask=is_element,
    )


@triton.jit(do_not_specialize=["num_splits", "min_split"])
def merge_splits_kernel(
    out_ptr,  # [num_rows, num_heads, HEAD_DIM]
    partial_ptr,  # fp32 [num_rows, num_heads, num_splits, HEAD_DIM]
    lse_ptr,  # fp32 [num_rows, num_heads, num_splits], base 2
    seq_lens_ptr,  # [num_rows] int32
    sinks_ptr,  # [num_heads] fp32 or None
    num_splits,
    min_split,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    SLIDING_WINDOW: tl.constexpr,
    BLOCK_N: tl.constexpr,  # of the split kernel
    MERGE_SPLITS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head_row = row * tl.num_programs(1) + tl.program_id(1)
    seq_len = tl.load(seq_lens_ptr + row)
    first, split_tokens = _split_plan(seq_len, num_splits, min_split, BLOCK_N, SLIDING_WINDOW)
    used_splits = tl.cdiv(seq_len - first, split_tokens)
    if used_splits <= 1:  # a padded row, or one that needs no merge
        return

    lanes = tl.arange(0, MERGE_SPLITS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    maximum = tl.full([1], LOWEST_SCORE, tl.float32)
    total = tl.zeros([1], tl.float32)
    output = tl.zeros([HEAD_DIM_PADDED], tl.float32)
    for chunk in range(0, used_splits, MERGE_SPLITS):
        is_split = chunk + lanes < used_splits
        partials = head_row * num_splits + chunk + lanes
        lse = tl.load(lse_ptr + partials, mask=is_split, other=float("-inf"))
        tile = tl.load(
            partial_ptr + partials[:, None] * HEAD_DIM + dims[None, :],
            mask=is_split[:, None] & (dims < HEAD_DIM)[None, :],
            other=0.0,
        )
        new_maximum = tl.maximum(maximum, tl.max(lse, 0))
        weights = tl.exp2(lse - new_maximum)
        shrink = tl.exp2(maximum - new_maximum)
        total = total * shrink + tl.sum(weights, 0)
        output = output * shrink + tl.sum(weights[:, None] * tile, 0)
        maximum = new_maximum
    if sinks_ptr is not None:
        total = with_sinks(total, maximum, sinks_ptr, tl.program_id(1) + tl.zeros([1], tl.int32), True)
    tl.store(
        out_ptr + head_row * HEAD_DIM + dims,
        (output / total).to(out_ptr.dtype.element_ty),
        mask=dims < HEAD_DIM,
    )


def paged_attention_decode(
    out: torch.Tensor,
    query: torch.Tensor,
    cache: LayerCache,
    block_tables: torch.Tensor,
    seq_lens: torch.Tensor,
    scoring: Scoring,
    *,
    max_seq_len: int,
    tile: Tile | None = None,
    splits: Splits | None = None,
) -> None:
    """Attention of one query token per row, written to `out`.

    Args:
        out: [num_rows, num_heads, head_dim], contiguous. Rows with `seq_lens` 0 are not written.
        query: [num_rows, num_heads, head_dim], last dimension contiguous.
        block_tables: [num_rows, max_blocks] int32; entries past a row's length are not read.
        seq_lens: [num_rows] int32, including the query's token.
        max_seq_len: at least the longest of `seq_lens`; sizes the grid. While capturing a graph, the longest that a
            replay can have.
        tile, splits: override `tuning`. If `splits.most` is at least max_seq_len / splits.min_tokens, every split has
            that size, regardless of the row's length.
    """
    num_rows, num_heads, head_dim = query.shape
    num_kv_heads, block_size = cache.num_kv_heads, cache.block_size
    group_size = num_heads // num_kv_heads
    tile = tile or decode_tile(
        head_dim,
        group_size,
        query.element_size(),
        compute_capability(query.device),
        is_scaled=cache.is_scaled,
    )
    assert out.is_contiguous()
    kv_programs = num_kv_heads * triton.cdiv(group_size, tile.block_m)
    if splits is None:
        window = abs(scoring.sliding_window or max_seq_len)
        longest = min(max_seq_len, window + tile.block_n)
        splits = decode_splits(num_rows * kv_programs, longest, multiprocessors(query.device))
    assert splits.min_tokens % tile.block_n == 0
    num_splits = splits.most
    split = num_splits > 1
    if split:
        partial = query.new_empty((num_rows, num_heads, num_splits, head_dim), dtype=torch.float32)
        lse = query.new_empty((num_rows, num_heads, num_splits), dtype=torch.float32)

    paged_attention_decode_kernel[(num_rows, kv_programs, num_splits)](
        out,
        partial if split else None,
        lse if split else None,
        query,
        cache.keys,
        cache.values,
        cache.key_scales,
        cache.value_scales,
        block_tables,
        seq_lens,
        scoring.alibi_slopes,
        scoring.sinks,
        scoring.scale,
        query.stride(0),
        query.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        block_tables.stride(0),
        splits.min_tokens,
        GROUP_SIZE=group_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=padded_head_dim(head_dim),
        BLOCK_SIZE=block_size,
        SLIDING_WINDOW=scoring.sliding_window or 0,
        SOFTCAP=scoring.softcap or 0.0,
        SPLIT=split,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        UPCAST=must_upcast(query, cache),
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=True,  # off by default since Triton 3.10; multiply-adds here should use FMAs
    )
    if split:
        merge_splits_kernel[(num_rows, num_heads)](
            out,
            partial,
            lse,
            seq_lens,
            scoring.sinks,
            num_splits,
            splits.min_tokens,
            HEAD_DIM=head_dim,
            HEAD_DIM_PADDED=padded_head_dim(head_dim),
            SLIDING_WINDOW=scoring.sliding_window or 0,
            BLOCK_N=tile.block_n,
            MERGE_SPLITS=_MERGE.block,
            num_warps=_MERGE.num_warps,
        )
