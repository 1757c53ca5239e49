"""The choice of each row's experts from a router's logits, in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels import experts
from pagemill.kernels.experts import Routing
from pagemill.kernels.gpu.tuning import next_power_of_2, row_warps

_LOWEST_KEY, _HIGHEST_KEY = tl.constexpr(-(2**31)), tl.constexpr(2**31 - 1)
_LOWEST_RANK = tl.constexpr(-(2**63))


@triton.jit
def route_kernel(
    weights_ptr,  # fp32 [num_rows, TOP_K]
    experts_ptr,  # int64 [num_rows, TOP_K]
    logits_ptr,  # [num_rows, NUM_EXPERTS]
    bias_ptr,  # [NUM_EXPERTS], or None
    stride_row,
    epsilon,
    scale,
    SIGMOID: tl.constexpr,
    NORMALIZES: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    NUM_EXPERTS_PADDED: tl.constexpr,
    TOP_K: tl.constexpr,
    TOP_K_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes, slots = tl.arange(0, NUM_EXPERTS_PADDED), tl.arange(0, TOP_K_PADDED)
    is_expert = lanes < NUM_EXPERTS
    logits = tl.load(logits_ptr + row * stride_row + lanes, mask=is_expert, other=float("-inf"))
    logits = logits.to(tl.float32)
    if SIGMOID:
        # Far below -87 the sigmoid is 0 in fp32, and exp would overflow. The comparison preserves NaN.
        scores = tl.sigmoid(tl.where(logits < -87.0, -87.0, logits))
    else:
        parts = tl.exp(logits - tl.max(logits, 0))
        scores = tl.div_rn(parts, tl.sum(parts, 0))
    choice = scores
    if bias_ptr is not None:
        choice += tl.load(bias_ptr + lanes, mask=is_expert, other=0.0).to(tl.float32)
    # Integers in the order of the values, with NaN above all others, as `torch.sort` has them. The lower bits are
    # larger for lower experts: ranks are distinct, also if no value is finite.
    bits = choice.to(tl.int32, bitcast=True)
    keys = tl.where(choice == choice, bits ^ ((bits >> 31) & _HIGHEST_KEY), _HIGHEST_KEY)
    keys = tl.where(is_expert, keys, _LOWEST_KEY)
    ranks = (keys.to(tl.int64) << 32) | (NUM_EXPERTS_PADDED - 1 - lanes)
    weights, chosen = tl.zeros([TOP_K_PADDED], tl.float32), tl.zeros([TOP_K_PADDED], tl.int64)
    for j in tl.static_range(TOP_K):
        best = tl.max(ranks, 0)
        expert = NUM_EXPERTS_PADDED - 1 - (best & (NUM_EXPERTS_PADDED - 1))
        chosen = tl.where(slots == j, expert, chosen)
        weights = tl.where(slots == j, tl.sum(tl.where(lanes == expert, scores, 0.0), 0), weights)
        ranks = tl.where(ranks == best, _LOWEST_RANK, ranks)
    if NORMALIZES:
        weights = tl.div_rn(weights, tl.sum(weights, 0) + epsilon)
    is_slot = slots < TOP_K
    tl.store(weights_ptr + row * TOP_K + slots, weights * scale, mask=is_slot)
    tl.store(experts_ptr + row * TOP_K + slots, chosen, mask=is_slot)


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagemill.kernels.dispatch.route`. Groups of experts are left to plain torch."""
    if routing.num_groups > 1:
        return experts.route(logits, bias, routing)
    num_rows, num_experts = logits.shape
    weights = torch.empty(num_rows, routing.top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(num_rows, routing.top_k, dtype=torch.int64, device=logits.device)
    if num_rows:
        route_kernel[(num_rows,)](
            weights,
            chosen,
            logits,
            bias,
            logits.stride(0),
            routing.epsilon,
            routing.scale,
            SIGMOID=routing.scores == "sigmoid",
            NORMALIZES=routing.normalizes,
            NUM_EXPERTS=num_experts,
            NUM_EXPERTS_PADDED=next_power_of_2(num_experts),
            TOP_K=routing.top_k,
            TOP_K_PADDED=next_power_of_2(routing.top_k),
            num_warps=row_warps(num_experts),
        )
    return weights, chosen
