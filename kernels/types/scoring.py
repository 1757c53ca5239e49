"""The score of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """The transformation of a query-key dot product before the softmax, the same in every step of a layer.

    A score is `scale * query . key`, then `softcap * tanh(score / softcap)`, then plus
    `alibi_slopes[head] * key position`; keys outside the window score minus infinity. The softmax is over the
    scores of a token's keys and its head's sink, whose weight is not applied to any value. With sinks,
    positions count from the query.
    """

    scale: float
    alibi_slopes: torch.Tensor | None = None
    """[num_heads] fp32, contiguous, on the query's device."""
    sliding_window: int | None = None
    """Key j is visible to query position i if first_visible(sliding_window, i) <= j <= i; None: if j <= i.

    See `types/window.py`; chunks are below 0.
    """
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[num_heads] like `alibi_slopes`: a separate score per head.

    Source: Xiao et al. 2024, "Efficient Streaming Language Models with Attention Sinks", with learned scores
    as in gpt-oss.
    """
    rounds_to_cache: bool = False
    """Round a prompt's queries and attention weights to bfloat16.

    Applies if the cache holds bfloat16 or int8 and the CPU multiplies bfloat16.
    """
