"""Matmuls of rows sorted by expert with each expert's weight, all experts in one launch.

The grid depends only on shapes: it has as many tiles as any division of the rows among the experts can need.
Every program locates its tile from the offsets on the device, so a launch can be captured in a graph.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tile_order import TILE_GROUP, tile_of_program
from pagemill.kernels.gpu.tuning import EXPERT_MATMUL_INPUTS, expert_matmul_tile, next_power_of_2


@triton.jit(do_not_specialize=["row_tiles"])
def expert_matmul_kernel(
    out_ptr,  # [num_rows, out_features]
    x_ptr,  # [num_rows, in_features]
    weight_ptr,  # [num_experts, out_features, in_features]
    bias_ptr,  # [num_experts, out_features], or None
    offsets_ptr,  # int64 [num_experts + 1]
    row_tiles,
    out_features,
    in_features,
    stride_x_row,
    NUM_EXPERTS: tl.constexpr,
    NUM_EXPERTS_PADDED: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK_K divides in_features
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_tile, column_tile = tile_of_program(row_tiles, tl.cdiv(out_features, BLOCK_N), GROUP)
    experts = tl.arange(0, NUM_EXPERTS_PADDED)
    is_expert = experts < NUM_EXPERTS
    starts = tl.load(offsets_ptr + experts, mask=is_expert, other=0).to(tl.int32)
    stops = tl.load(offsets_ptr + experts + 1, mask=is_expert, other=0).to(tl.int32)
    tiles = tl.cdiv(stops - starts, BLOCK_M)
    through = tl.cumsum(tiles, 0)
    expert = tl.sum((through <= row_tile).to(tl.int32), 0)
    if expert >= NUM_EXPERTS:
        return
    is_own = experts == expert
    in_expert = row_tile - tl.sum(tl.where(is_own, through - tiles, 0), 0)
    rows = tl.sum(tl.where(is_own, starts, 0), 0) + in_expert * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < tl.sum(tl.where(is_own, stops, 0), 0), columns < out_features
    inner = tl.arange(0, BLOCK_K)
    outputs = expert.to(tl.int64) * out_features + columns
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + inner[None, :]
    weight_ptrs = weight_ptr + outputs[None, :] * in_features + inner[:, None]
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if WHOLE:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_column[None, :], other=0.0)
        else:
            is_input = start + inner < in_features
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_column[None, :] & is_input[:, None], other=0.0)
        total = tl.dot(x, weight, total, input_precision="ieee")
    if bias_ptr is not None:
        total += tl.load(bias_ptr + outputs, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def most_tiles(num_rows: int, num_experts: int, block_m: int) -> int:
    """Return the number of tiles of `block_m` rows that any division of the rows among the experts fits in."""
    return (num_rows + min(num_rows, num_experts) * (block_m - 1)) // block_m


def expert_matmul(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.expert_matmul`."""
    num_rows, (num_experts, out_features, in_features) = len(rows), weight.shape
    out = rows.new_empty(num_rows, out_features)
    if num_rows == 0:
        return out
    tile = expert_matmul_tile(triton.cdiv(num_rows, num_experts), rows.element_size())
    row_tiles = most_tiles(num_rows, num_experts, tile.block_m)
    expert_matmul_kernel[(row_tiles * triton.cdiv(out_features, tile.block_n),)](
        out,
        rows,
        weight,
        bias,
        offsets,
        row_tiles,
        out_features,
        in_features,
        rows.stride(0),
        NUM_EXPERTS=num_experts,
        NUM_EXPERTS_PADDED=next_power_of_2(num_experts),
        WHOLE=in_features % EXPERT_MATMUL_INPUTS == 0,
        GROUP=TILE_GROUP,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=EXPERT_MATMUL_INPUTS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
