"""Top-k, top-p and min-p limit the tokens that a row can draw, by their probability.

Applied in this order, each to the result of the previous one, as in transformers. Ties with the last remaining token
remain. Every decision is made within its row, so it does not depend on the batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from pagemill.engine.sampling_params import SamplingParams
from pagemill.kernels.selection import kth_largest, top_p_thresholds


def filter_logits(logits: torch.Tensor, params: Sequence[SamplingParams]) -> None:
    """Set excluded tokens to minus infinity, in place.

    Args:
        logits: [num_rows, vocab_size] float32, divided by the temperature.
        params: one per row.
    """
    size, device = logits.shape[-1], logits.device
    top_k = [number for number, row in enumerate(params) if 0 < row.top_k < size]
    if top_k:
        counts = torch.tensor([params[number].top_k for number in top_k], device=device)
        _cut(logits, top_k, kth_largest(_rows(logits, top_k), counts))
    top_p = [number for number, row in enumerate(params) if row.top_p < 1.0]
    if top_p:
        mass = torch.tensor([params[number].top_p for number in top_p], dtype=torch.float64, device=device)
        _cut(logits, top_p, top_p_thresholds(_rows(logits, top_p), mass))
    min_p = [number for number, row in enumerate(params) if row.min_p > 0.0]
    if min_p:
        shares = torch.tensor([params[number].min_p for number in min_p], device=device)
        peaks = _rows(logits, min_p).amax(dim=-1, keepdim=True)
        _cut(logits, min_p, peaks + shares.log()[:, None])


def _rows(logits: torch.Tensor, numbers: list[int]) -> torch.Tensor:
    """Return all rows as a view, or a subset as a copy."""
    return logits if len(numbers) == len(logits) else logits[torch.tensor(numbers, device=logits.device)]


def _cut(logits: torch.Tensor, numbers: list[int], thresholds: torch.Tensor) -> None:
    """Exclude the tokens below their row's threshold [num_rows, 1]."""
    if len(numbers) == len(logits):
        logits.masked_fill_(logits < thresholds, -torch.inf)
        return
    rows = torch.tensor(numbers, device=logits.device)
    chosen = logits[rows]
    logits[rows] = chosen.masked_fill_(chosen < thresholds, -torch.inf)
