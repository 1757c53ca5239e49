"""Top-k, top-p and min-p: which tokens of a row may be drawn, by their probability.

Applied in this order, each to what the one before has left, as transformers does. Ties with the last token kept
are kept. Every decision is made within its row, so it does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.sampling_params import SamplingParams

_HEAD_TOKENS = 1024
"""Top-p looks at this many of the best tokens before it sorts the whole vocabulary."""


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
    probabilities = logits.softmax(dim=-1, dtype=torch.float64)
    size = logits.shape[-1]
    if logits.device.type != "cpu" or size <= _HEAD_TOKENS:  # elsewhere a sort is cheap, and asking waits
        return _threshold_in(logits, probabilities, mass, size)
    thresholds = _threshold_in(logits, probabilities, mass, _HEAD_TOKENS)
    head = probabilities.topk(_HEAD_TOKENS).values.cumsum(dim=-1)[:, -1:]
    for row in (head < mass).flatten().nonzero().flatten().tolist():
        one = slice(row, row + 1)
        thresholds[one] = _threshold_in(logits[one], probabilities[one], mass[one], size)
    return thresholds


def _threshold_in(
    logits: torch.Tensor, probabilities: torch.Tensor, mass: torch.Tensor, num_best: int
) -> torch.Tensor:
    whole = num_best == logits.shape[-1]
    ordered, ids = logits.sort(dim=-1, descending=True) if whole else logits.topk(num_best)
    reached = probabilities.gather(1, ids).cumsum(dim=-1)
    # The first token whose predecessors reach the mass is out: as many stay as do not reach it, and one more.
    num_kept = (reached < mass).sum(dim=-1, keepdim=True).clamp_(max=num_best - 1)
    return ordered.gather(1, num_kept)
