"""The sampling settings of a step's random rows."""

from __future__ import annotations

from typing import NamedTuple

import torch


class SamplingRows(NamedTuple):
    """One entry per row: [num_rows] each, contiguous, on the logits' device."""

    temperatures: torch.Tensor
    """fp32, above 0."""
    top_k: torch.Tensor
    """int32; 0: every token."""
    top_p: torch.Tensor
    """fp64; 1: every token."""
    log_min_p: torch.Tensor
    """fp32, the logarithm of min_p; -inf: every token."""
    seeds: torch.Tensor
    """int64, in [0, 2**63)."""
    sample_indices: torch.Tensor
    """int64, the index among the request's n samples."""
    positions: torch.Tensor
    """int64, output position, counted from the first generated token."""
