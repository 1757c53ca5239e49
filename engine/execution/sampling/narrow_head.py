"""Computes logits of a few tokens only, if every sample of a step is restricted to a few.

A labeling step chooses among the first tokens of some labels: a few of a vocabulary of tens of thousands.
Each value of a packed matmul depends only on its row and its channel, to the last bit. A matmul with only
those channels therefore returns the same logits as the complete one, and the choice among them is the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast, runtime_checkable

import torch
from torch import nn

from pagemill.engine.execution.sampling.processors import SampleWork

MOST_TOKENS = 256
"""Maximum total number of tokens to choose from in a step; above it the entire vocabulary is computed."""
_KEPT = 8
"""Number of cached packed channel selections: the root of a trie serves an entire data set."""


@dataclass(frozen=True, slots=True)
class NarrowVocabulary:
    """The subset of tokens that a step's logits represent."""

    token_ids: tuple[int, ...]
    """Ascending, so that ties resolve to the lowest id here as well."""
    barred: torch.Tensor | None = None
    """[num_samples, num_tokens] bool: tokens that a sample must not choose. None: no restriction."""


NOTHING_SAMPLED = NarrowVocabulary((0,))
"""The selection for a step without samples, whose logits are not read."""


@runtime_checkable
class _Selectable(Protocol):
    out_features: int

    def of_channels(self, channels: torch.Tensor) -> nn.Module | None:
        """Return a layer with only these outputs, bit-identical; None if this layer does not support it."""
        ...


class NarrowHead:
    """Makes a model's head compute only some of its outputs."""

    def __init__(self, head: _Selectable) -> None:
        self._head: Any = head
        self._select = lru_cache(maxsize=_KEPT)(self._selected)

    @classmethod
    def from_module(cls, module: Any) -> NarrowHead | None:
        """Wrap one of transformers' causal language models; return None if its head cannot compute a part.

        A family's changes to its logits after the matmul (a scale, a softcap) are elementwise.
        """
        head = module.get_output_embeddings()
        if not isinstance(head, _Selectable) or head.of_channels(torch.zeros(1, dtype=torch.int64)) is None:
            return None
        return cls(head)

    def vocabulary(self, work: Sequence[SampleWork]) -> NarrowVocabulary | None:
        """Return the tokens that these samples need; None: all."""
        if not work:
            return NOTHING_SAMPLED
        allowed = []
        for item in work:
            ids = _confined_to(item)
            if not ids or len(ids) > MOST_TOKENS:
                return None
            allowed.append(frozenset(ids))
        union = tuple(sorted(frozenset().union(*allowed)))
        if len(union) > MOST_TOKENS or union[-1] >= self._head.out_features:
            return None
        return NarrowVocabulary(union, _barred(allowed, union))

    @contextmanager
    def only(self, token_ids: tuple[int, ...]) -> Iterator[None]:
        """Limit the head's outputs to these tokens until the end of the block."""
        self._head.forward = self._select(token_ids).forward
        try:
            yield
        finally:
            del self._head.forward

    def _selected(self, token_ids: tuple[int, ...]) -> nn.Module:
        return cast(nn.Module, self._head.of_channels(torch.tensor(token_ids)))


def _confined_to(work: SampleWork) -> Sequence[int] | None:
    """Return the tokens that a sample can choose from, if its parameters require nothing else."""
    sample, params = work.sample, work.params
    grammar = sample.allowed_token_ids
    if grammar is None and (sample.token_mask is not None or params.allowed_token_ids is None):
        return None
    is_filtered = params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0
    if (
        (grammar is not None and params.allowed_token_ids is not None)  # one may override the other
        or params.logprobs is not None
        or sample.num_candidates
        or params.logit_bias
        or params.min_tokens
        or work.row.bad_word_ids
        or params.repetition_penalty != 1.0
        or params.presence_penalty
        or params.frequency_penalty
        or (is_filtered and not params.is_greedy)  # filters sum probabilities, here in a different order
    ):
        return None
    return params.allowed_token_ids if grammar is None else grammar


def _barred(allowed: list[frozenset[int]], union: tuple[int, ...]) -> torch.Tensor | None:
    if all(len(ids) == len(union) for ids in allowed):
        return None
    columns = {token_id: column for column, token_id in enumerate(union)}
    rows = [number for number, ids in enumerate(allowed) for _ in ids]
    barred = torch.ones(len(allowed), len(union), dtype=torch.bool)
    barred[rows, [columns[token_id] for ids in allowed for token_id in ids]] = False
    return barred
