"""Mixture of experts (MoE): routing, sorting by expert, matmuls and combining, in plain torch.

A row's experts, their weights and its sum depend only on that row. Experts have no capacity limit, and no row
is dropped.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Routing:
    """Rules that turn a router's logits into experts and weights.

    Softmax over only the chosen logits equals softmax over all of them, normalized after the choice.
    """

    top_k: int
    scores: Literal["softmax", "sigmoid"] = "softmax"
    normalizes: bool = False
    """Divide a row's weights by their sum."""
    epsilon: float = 0.0
    """Added to that sum."""
    scale: float = 1.0
    """Factor of the final weights."""
    num_groups: int = 1
    """Number of groups of adjacent experts. Experts are chosen from the best `kept_groups` groups."""
    kept_groups: int = 1
    group_best: int = 1
    """A group's score is the sum of this many of its best experts: 1 or 2."""


def route(
    logits: torch.Tensor, bias: torch.Tensor | None, routing: Routing
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose each row's experts by its logits [num_rows, num_experts], and weigh them.

    Args:
        bias: [num_experts], added to the scores for the choice, not for the weights.

    Returns:
        Weights fp32 [num_rows, top_k], and experts int64 [num_rows, top_k], best first, the lowest of equal ones first.
    """
    logits = logits.float()
    scores = logits.sigmoid() if routing.scores == "sigmoid" else logits.softmax(dim=-1)
    choice = scores if bias is None else scores + bias
    if routing.num_groups > 1:
        groups = choice.unflatten(1, (routing.num_groups, -1))
        best = groups.topk(min(routing.group_best, groups.shape[-1]), dim=-1).values.sum(dim=-1)
        kept = torch.zeros_like(best, dtype=torch.bool)
        kept.scatter_(1, best.topk(routing.kept_groups, dim=-1).indices, True)
        choice = groups.masked_fill(~kept[..., None], float("-inf")).flatten(1)
    indices = choice.sort(dim=-1, descending=True, stable=True).indices[:, : routing.top_k]
    weights = scores.gather(1, indices)
    if routing.normalizes:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + routing.epsilon)
    return weights * routing.scale, indices


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """gate * sigmoid(alpha * gate) * (up + 1), gate up to `limit`, up in -limit .. limit, as in gpt-oss.

    Args:
        gate_up: [num_rows, 2 * size], the gate first.

    Returns:
        [num_rows, size], new; computed in fp32 and rounded once.
    """
    gate, up = gate_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (gate * torch.sigmoid(alpha * gate) * (up + 1)).to(gate_up.dtype)


def sort_by_expert(
    x: torch.Tensor, indices: torch.Tensor, num_experts: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Copy rows of x [num_rows, size] once per chosen expert, sorted by expert.

    Args:
        indices: int64 [num_rows, top_k], each in 0 .. num_experts - 1.

    Returns:
        Rows [num_rows * top_k, size]; the position of every choice among them, int64 [num_rows * top_k]; and int64
        [num_experts + 1], the start of each expert's rows.
    """
    chosen, order = torch.sort(indices.flatten(), stable=True)
    bounds = torch.arange(num_experts + 1, device=x.device)
    offsets = torch.searchsorted(chosen, bounds)
    places = torch.empty_like(order)
    places[order] = torch.arange(len(order), device=x.device)
    return x[order // indices.shape[1]], places, offsets


def expert_matmul(
    rows: torch.Tensor, weight: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Multiply rows [num_rows, in_features], sorted by expert, by each expert's weight.

    The kernel does not read the offsets on the host; this function does, so it waits for a GPU.

    Args:
        weight: [num_experts, out_features, in_features], contiguous.
        offsets: int64 [num_experts + 1]: the rows of expert e are offsets[e] .. offsets[e + 1] - 1.
        bias: [num_experts, out_features].

    Returns:
        [num_rows, out_features], summed in fp32 with the bias, and rounded once.
    """
    out = rows.new_empty(len(rows), weight.shape[1])
    for expert, (low, high) in enumerate(pairwise(offsets.tolist())):
        if low < high:
            added = None if bias is None else bias[expert]
            out[low:high] = torch.nn.functional.linear(rows[low:high], weight[expert], added)
    return out


def combine_experts(rows: torch.Tensor, places: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return [num_rows, size]: the weighted sum of each row's experts, in the order of selection.

    Args:
        rows: [num_rows * top_k, size], contiguous, sorted by `sort_by_expert`, which also returns `places`.
        weights: [num_rows, top_k].
    """
    parts = rows[places].view(*weights.shape, -1).float()
    return (parts * weights.float()[..., None]).sum(dim=1).to(rows.dtype)
