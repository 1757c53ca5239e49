"""A step's rows with random sampling, staged for the kernel that draws their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from pagemill.engine.execution.sampling.processors import SampleWork
from pagemill.engine.execution.staging import Transfer
from pagemill.kernels import dispatch
from pagemill.kernels.types.sampling_rows import SamplingRows


@dataclass(frozen=True, slots=True)
class StagedDraws:
    """The samples of a step that are drawn, with their parameters."""

    index: torch.Tensor
    """[num_draws] int64, into the step's samples."""
    rows: SamplingRows
    has_filters: bool
    is_all: bool
    """True if every sample of the step is drawn."""


def stage_draws(work: Sequence[SampleWork], transfer: Transfer) -> StagedDraws | None:
    """Stage the draws' inputs; return None if every sample is greedy."""
    random = [number for number, item in enumerate(work) if not item.params.is_greedy]
    if not random:
        return None
    drawn = [work[number] for number in random]
    params = [item.params for item in drawn]
    put = transfer.put
    rows = SamplingRows(
        temperatures=put(np.array([row.temperature for row in params], dtype=np.float32)),
        top_k=put(np.array([max(0, row.top_k) for row in params], dtype=np.int32)),
        top_p=put(np.array([row.top_p for row in params], dtype=np.float64)),
        # Computed by torch, as on the CPU: numpy's logarithm may round differently.
        log_min_p=put(torch.tensor([row.min_p for row in params], dtype=torch.float32).log().numpy()),
        seeds=put(np.array([item.row.seed for item in drawn], dtype=np.int64)),
        sample_indices=put(np.array([item.row.sample_index for item in drawn], dtype=np.int64)),
        positions=put(np.array([item.output_position for item in drawn], dtype=np.int64)),
    )
    has_filters = any(row.top_k > 0 or row.top_p < 1.0 or row.min_p > 0.0 for row in params)
    index = put(np.array(random, dtype=np.int64))
    return StagedDraws(index, rows, has_filters, is_all=len(random) == len(work))


def draw(logits: torch.Tensor, peaks: torch.Tensor, draws: StagedDraws) -> torch.Tensor:
    """Draw tokens, [num_draws] int64.

    Args:
        logits: [num_samples, vocab_size] fp32, for all samples of the step.
        peaks: [num_samples] fp32, the largest logit of each.
    """
    if not draws.is_all:
        logits, peaks = logits[draws.index], peaks[draws.index]
    return dispatch.sample_tokens(logits, peaks, draws.rows, has_filters=draws.has_filters)
