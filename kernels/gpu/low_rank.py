"""Matmuls with the low-rank matrices of adapters, grouped: each tile of rows has one adapter.

Every block of outputs needs the complete small matmul, so there are two kernels. `shrink` computes x A^T;
`expand` multiplies the result by B and adds it to the outputs in place. The matrices are located by address
(`LowRankTable`), so their ranks can differ. A rank is padded only in registers.

With few rows, several programs of `shrink` each sum a range of the inputs, and `expand` adds their sums in a fixed
order. A program of an empty tile exits, so a captured graph can have more tiles than a step.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES, low_rank_splits
from pagemill.kernels.types.low_rank import ENTRY_NUMBERS, TILE_ROWS, AdapterRows, LowRankTable

_SHRINK, _EXPAND = LAUNCHES["low_rank_shrink"], LAUNCHES["low_rank_expand"]
_SMALLEST_DOT, _LARGEST_DOT = 16, 64


@triton.jit(do_not_specialize=["num_adapted"])
def shrink_kernel(
    products_ptr,  # [num_splits, num_adapted, num_parts, max_rank] fp32
    x_ptr,  # [num_rows, in_features]
    order_ptr,  # [num_adapted]
    tiles_ptr,  # [num_tiles, 3]
    entries_ptr,  # [num_slots, num_parts, ENTRY]
    num_adapted,
    in_features,
    split_inputs,
    stride_x_row,
    stride_entries_slot,
    max_rank,
    ENTRY: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    rank_blocks = tl.cdiv(max_rank, BLOCK_R)
    split, first_rank = tl.program_id(2) // rank_blocks, tl.program_id(2) % rank_blocks * BLOCK_R
    slot, first, count = (
        tl.load(tiles_ptr + 3 * tile).to(tl.int64),
        tl.load(tiles_ptr + 3 * tile + 1),
        tl.load(tiles_ptr + 3 * tile + 2),
    )
    entry = entries_ptr + slot * stride_entries_slot + ENTRY * part
    rank = tl.load(entry + 2)
    if (count == 0) | (first_rank >= rank):
        return
    matrix = tl.multiple_of(tl.load(entry).to(tl.pointer_type(x_ptr.dtype.element_ty)), 16)
    ranks = first_rank + tl.arange(0, BLOCK_R)
    places, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_K)
    is_row, is_rank = places < count, ranks < rank
    rows = tl.load(order_ptr + first + places, mask=is_row, other=0).to(tl.int64)
    total = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for begin in range(split * split_inputs, tl.minimum((split + 1) * split_inputs, in_features), BLOCK_K):
        columns = begin + inner
        is_column = columns < in_features
        x_ptrs = x_ptr + rows[:, None] * stride_x_row + columns[None, :]
        x = tl.load(x_ptrs, mask=is_row[:, None] & is_column[None, :], other=0.0)
        a_ptrs = matrix + ranks[None, :].to(tl.int64) * in_features + columns[:, None]
        a = tl.load(a_ptrs, mask=is_rank[None, :] & is_column[:, None], other=0.0)
        total = tl.dot(x, a, total, input_precision="ieee")
    of_split = products_ptr + split.to(tl.int64) * num_adapted * num_parts * max_rank
    out_ptrs = of_split + ((first + places) * num_parts + part)[:, None] * max_rank + ranks[None, :]
    tl.store(out_ptrs, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_adapted", "num_splits"])
def expand_kernel(
    out_ptr,  # [num_rows, out_features]
    products_ptr,  # [num_splits, num_adapted, num_parts, max_rank] fp32
    order_ptr,
    tiles_ptr,
    entries_ptr,
    starts_ptr,  # [num_parts + 1]
    num_adapted,
    num_splits,
    stride_out_row,
    stride_entries_slot,
    max_rank,
    ENTRY: tl.constexpr,
    WIDTH_MULTIPLE: tl.constexpr,  # divides all starts
    BLOCK_R: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    tile, part, num_parts = tl.program_id(0), tl.program_id(1), tl.num_programs(1)
    slot, first, count = (
        tl.load(tiles_ptr + 3 * tile).to(tl.int64),
        tl.load(tiles_ptr + 3 * tile + 1),
        tl.load(tiles_ptr + 3 * tile + 2),
    )
    entry = entries_ptr + slot * stride_entries_slot + ENTRY * part
    rank = tl.load(entry + 2)
    start = tl.multiple_of(tl.load(starts_ptr + part), WIDTH_MULTIPLE)
    width = tl.multiple_of(tl.load(starts_ptr + part + 1), WIDTH_MULTIPLE) - start
    columns = tl.program_id(2) * BLOCK_N + tl.arange(0, BLOCK_N)
    if (count == 0) | (rank == 0) | (tl.program_id(2) * BLOCK_N >= width):
        return
    dtype = out_ptr.dtype.element_ty
    matrix = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(dtype)), 16)
    places, inner = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_R)
    is_row, is_column = places < count, columns < width
    rows = tl.load(order_ptr + first + places, mask=is_row, other=0).to(tl.int64)
    row_ptrs = products_ptr + ((first + places) * num_parts + part)[:, None] * max_rank
    stride_split = num_adapted.to(tl.int64) * num_parts * max_rank
    change = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for begin in range(0, rank, BLOCK_R):
        ranks = begin + inner
        is_rank = ranks < rank
        is_product = is_row[:, None] & is_rank[None, :]
        products = tl.load(row_ptrs + ranks[None, :], mask=is_product, other=0.0)
        for split in range(1, num_splits):
            split_ptrs = row_ptrs + split * stride_split + ranks[None, :]
            products += tl.load(split_ptrs, mask=is_product, other=0.0)
        b_ptrs = matrix + ranks[:, None].to(tl.int64) * width + columns[None, :]
        b = tl.load(b_ptrs, mask=is_rank[:, None] & is_column[None, :], other=0.0)
        change = tl.dot(products, b.to(tl.float32), change, input_precision="ieee")
    out_ptrs = out_ptr + rows[:, None] * stride_out_row + (start + columns)[None, :]
    mask = is_row[:, None] & is_column[None, :]
    out = tl.load(out_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptrs, (out + change).to(dtype), mask=mask)


def rank_block(max_rank: int) -> int:
    """Return the number of ranks that a matmul sums in one step: as many as fit in registers next to the sums."""
    return min(_LARGEST_DOT, max(_SMALLEST_DOT, triton.next_power_of_2(max_rank)))


def add_low_rank(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> None:
    """See `pagemill.kernels.dispatch.add_low_rank`."""
    num_tiles, num_parts, num_adapted = len(rows.tiles), table.num_parts, len(rows.order)
    if num_tiles == 0:
        return
    max_rank, block_r, in_features = table.max_rank, rank_block(table.max_rank), x.shape[1]
    rank_blocks = triton.cdiv(max_rank, block_r)
    num_splits, split_inputs = low_rank_splits(num_tiles * num_parts * rank_blocks, in_features, x.device)
    products = torch.empty(num_splits, num_adapted, num_parts, max_rank, dtype=torch.float32, device=x.device)
    groups = (rows.order, rows.tiles, table.entries)
    shrink_kernel[(num_tiles, num_parts, num_splits * rank_blocks)](
        products,
        x,
        *groups,
        num_adapted,
        in_features,
        split_inputs,
        x.stride(0),
        table.entries.stride(0),
        max_rank,
        ENTRY=ENTRY_NUMBERS,
        BLOCK_R=block_r,
        BLOCK_M=TILE_ROWS,
        BLOCK_K=_SHRINK.block,
        num_warps=_SHRINK.num_warps,
        num_stages=_SHRINK.num_stages,
    )
    expand_kernel[(num_tiles, num_parts, triton.cdiv(out.shape[1], _EXPAND.block))](
        out,
        products,
        *groups,
        table.starts,
        num_adapted,
        num_splits,
        out.stride(0),
        table.entries.stride(0),
        max_rank,
        ENTRY=ENTRY_NUMBERS,
        WIDTH_MULTIPLE=table.width_multiple,
        BLOCK_R=block_r,
        BLOCK_M=TILE_ROWS,
        BLOCK_N=_EXPAND.block,
        num_warps=_EXPAND.num_warps,
        num_stages=_EXPAND.num_stages,
    )
