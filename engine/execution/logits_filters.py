"""Top-k, top-p and min-p: which tokens of a row may be drawn, by their probability.

Applied in this order, each to what the one before has left, as transformers does. Ties with the last token kept
are kept. Every decision is made within its row, so it does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling_params import SamplingParams

_HEADS = (256, 4096)
"""Top-p looks at so many of the best tokens before it sorts the whole vocabulary."""


def filter_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set what may not be drawn to minus infinity, in place.

    Args:
        logits: [num_rows, vocab_size] float32, divided by the temperature.
        params: one per row.
    """
    size, device = logits.shape[-1], logits.device
    top_k = [number for number, row in enumerate(params) if 0 < row.top_k < size]
    if top_k:
        rows = torch.tensor(top_k, device=device)
        counts = torch.tensor([params[number].top_k for number in top_k], device=device)
        best = logits[rows].topk(max(params[number].top_k for number in top_k)).values
        _cut(logits, rows, best.gather(1, counts[:, None] - 1))
    top_p = [number for number, row in enumerate(params) if row.top_p < 1.0]
    if top_p:
        rows = torch.tensor(top_p, device=device)
        mass = torch.tensor([params[number].top_p for number in top_p], dtype=torch.float64, device=device)
        _cut(logits, rows, _top_p_thresholds(logits[rows], mass[:, None]))
    min_p = [number for number, row in enumerate(params) if row.min_p > 0.0]
    if min_p:
        rows = torch.tensor(min_p, device=device)
        shares = torch.tensor([params[number].min_p for number in min_p], device=device)
        _cut(logits, rows, logits[rows].amax(dim=-1, keepdim=True) + shares.log()[:, None])


def _cut(logits: torch.Tensor, rows: torch.Tensor, thresholds: torch.Tensor) -> None:
    """Drop what is below its row's threshold [num_rows, 1]."""
    chosen = logits[rows]
    logits[rows] = chosen.masked_fill(chosen < thresholds, -torch.inf)


def _top_p_thresholds(logits: torch.Tensor, mass: torch.Tensor) -> torch.Tensor:
    """The least likely logit of each row's smallest set with at least this mass, [num_rows, 1]."""
    probabilities = logits.softmax(dim=-1)
    size = logits.shape[-1]
    thresholds = torch.empty_like(logits[:, :1])
    rows = torch.arange(len(logits), device=logits.device)
    # Elsewhere a sort is cheap, and asking which rows are done would wait for the device.
    for num_best in [n for n in _HEADS if n < size and logits.device.type == "cpu"] + [size]:
        ordered, ids = (
            logits[rows].sort(dim=-1, descending=True) if num_best == size else logits[rows].topk(num_best)
        )
        reached = probabilities[rows].gather(1, ids).cumsum(dim=-1, dtype=torch.float64)
        # The first token whose predecessors reach the mass is out: those that do not reach it stay, and one more.
        num_kept = (reached < mass[rows]).sum(dim=-1, keepdim=True).clamp_(max=num_best - 1)
        thresholds[rows] = ordered.gather(1, num_kept)
        if num_best < size:
            rows = rows[reached[:, -1] < mass[rows, 0]]
            if not len(rows):
                break
    return thresholds
