"""The score of a query and a key."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Scoring:
    """The transformation of a product of query and key before the softmax, the same in every step of a layer.

    A score is `scale * query . key`, then `softcap * tanh(score / softcap)`, then plus
    `alibi_slopes[head] * key position`; keys outside the window score minus infinity. The softmax is over the scores of
    a token's keys and its head's sink, whose weight falls on no value; next to sinks, positions count from the query.
    """

    scale: float
    alibi_slopes: torch.Tensor | None = None
    """[num_heads] fp32, contiguous, on the query's device."""
    sliding_window: int | None = None
    """Key j is visible to query position i if first_visible(sliding_window, i) <= j <= i (`types/window.py`: chunks are
    below 0); None: if j <= i."""
    softcap: float | None = None
    sinks: torch.Tensor | None = None
    """[num_heads] as `alibi_slopes`: a score per head, added to nothing else. Source: Xiao et al. 2024, "Efficient
    Streaming Language Models with Attention Sinks", with learned scores as in gpt-oss."""
    rounds_to_cache: bool = False
    """A prompt's queries and the weights of values are rounded to bfloat16, where the cache holds such numbers or int8
    and the CPU multiplies them."""
