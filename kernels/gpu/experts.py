"""Mixture of experts on a GPU: the copies before and after the experts' matmuls, and gpt-oss's activation."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES

_PLACES, _ROWS, _GATED = LAUNCHES["expert_places"], LAUNCHES["expert_rows"], LAUNCHES["silu_and_mul"]
_NO_EXPERT = tl.constexpr(2**31 - 1)


@triton.jit(do_not_specialize=["num_choices"])
def expert_places_kernel(
    places_ptr,  # int64 [num_choices]
    offsets_ptr,  # int64 [num_experts + 1]
    chosen_ptr,  # int64 [num_choices]
    num_choices,
    BLOCK: tl.constexpr,
):
    """A stable counting sort with one program per expert and one for the end of the last expert's rows."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    lower = tl.zeros([BLOCK], tl.int32)
    for begin in range(0, num_choices, BLOCK):
        chosen = tl.load(chosen_ptr + begin + lanes, mask=begin + lanes < num_choices, other=_NO_EXPERT)
        lower += (chosen < expert).to(tl.int32)
    first = tl.sum(lower, 0)
    tl.store(offsets_ptr + expert, first)
    for begin in range(0, num_choices, BLOCK):
        chosen = tl.load(chosen_ptr + begin + lanes, mask=begin + lanes < num_choices, other=_NO_EXPERT)
        is_own = (chosen == expert).to(tl.int32)
        tl.store(places_ptr + begin + lanes, first + tl.cumsum(is_own, 0) - 1, mask=chosen == expert)
        first += tl.sum(is_own, 0)


@triton.jit
def spread_rows_kernel(
    out_ptr,  # [num_rows * TOP_K, size]
    x_ptr,  # [num_rows, size]
    places_ptr,  # int64 [num_rows * TOP_K]
    size,
    stride_x_row,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=is_column)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + j)
        tl.store(out_ptr + place * size + columns, x, mask=is_column)


@triton.jit
def combine_experts_kernel(
    out_ptr,  # [num_rows, size]
    rows_ptr,  # [num_rows * TOP_K, size]
    places_ptr,  # int64 [num_rows * TOP_K]
    weights_ptr,  # [num_rows, TOP_K]
    size,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(TOP_K):
        place = tl.load(places_ptr + row * TOP_K + j)
        weight = tl.load(weights_ptr + row * TOP_K + j).to(tl.float32)
        part = tl.load(rows_ptr + place * size + columns, mask=is_column, other=0.0)
        total += part.to(tl.float32) * weight
    tl.store(out_ptr + row * size + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


@triton.jit
def clamped_swiglu_kernel(
    out_ptr,  # [num_rows, size]
    gate_up_ptr,  # [num_rows, 2 * size], the gate first
    size,
    stride_row,
    alpha,
    limit,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < size
    gate_ptr = gate_up_ptr + row * stride_row
    gate = tl.load(gate_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_ptr + size + columns, mask=is_column, other=0.0).to(tl.float32)
    # Comparisons preserve NaN, which `tl.minimum` does not.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    # Far below -87 the sigmoid is 0 in fp32, and exp would overflow.
    out = gate * tl.sigmoid(tl.maximum(alpha * gate, -87.0)) * (up + 1.0)
    tl.store(out_ptr + row * size + columns, out.to(out_ptr.dtype.element_ty), mask=is_column)


def sort_by_expert(
    x: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """See `pagemill.kernels.dispatch.sort_by_expert`."""
    indices = indices.contiguous()
    (num_rows, size), top_k = x.shape, indices.shape[1]
    places = torch.empty(indices.numel(), dtype=torch.int64, device=x.device)
    offsets = torch.empty(num_experts + 1, dtype=torch.int64, device=x.device)
    expert_places_kernel[(num_experts + 1,)](
        places, offsets, indices, indices.numel(), BLOCK=_PLACES.block, num_warps=_PLACES.num_warps
    )
    rows = x.new_empty(len(places), size)
    if num_rows:
        spread_rows_kernel[(num_rows, triton.cdiv(size, _ROWS.block))](
            rows, x, places, size, x.stride(0), TOP_K=top_k, BLOCK=_ROWS.block, num_warps=_ROWS.num_warps
        )
    return rows, places, offsets


def combine_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.combine_experts`."""
    weights = weights.contiguous()
    (num_rows, top_k), size = weights.shape, rows.shape[1]
    out = rows.new_empty(num_rows, size)
    if num_rows:
        combine_experts_kernel[(num_rows, triton.cdiv(size, _ROWS.block))](
            out, rows, places, weights, size, TOP_K=top_k, BLOCK=_ROWS.block, num_warps=_ROWS.num_warps
        )
    return out


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.clamped_swiglu`."""
    num_rows, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = gate_up.new_empty((num_rows, size))
    if num_rows:
        clamped_swiglu_kernel[(num_rows, triton.cdiv(size, _GATED.block))](
            out,
            gate_up,
            size,
            gate_up.stride(0),
            alpha,
            limit,
            BLOCK=_GATED.block,
            num_warps=_GATED.num_warps,
        )
    return out
