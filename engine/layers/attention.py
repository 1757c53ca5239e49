"""Paged attention, plugged into transformers' attention interface.

The batch is flattened to [1, num_tokens]; the step's metadata maps tokens to sequences, and reaches the
attention function through a context variable, because not every family passes extra arguments down to it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.layers.library import ALL_ATTENTION_FUNCTIONS
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

PAGED_ATTENTION = "pagemill_paged"


@dataclass(frozen=True, slots=True)
class AttentionContext:
    metadata: AttentionMetadata
    layers: list[LayerCache]
    read_tokens: torch.Tensor | None = None
    """[any] int64, ascending: the tokens whose last hidden states are read; None = all."""


_context: ContextVar[AttentionContext] = ContextVar("attention_context")


@contextmanager
def attention_context(context: AttentionContext) -> Iterator[None]:
    """Make attention inside the block read and write this step's cache."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def current_context() -> AttentionContext:
    return _context.get()


def attend(
    layer_idx: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring
) -> torch.Tensor:
    """Write the layer's keys and values, then attend.

    Args:
        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    context = current_context()
    cache = context.layers[layer_idx]
    dispatch.reshape_and_cache(key, value, cache, context.metadata.slot_mapping)
    return dispatch.paged_attention(query, cache, context.metadata, scoring)


def _paged_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention function: rotary embedding and QK norm have been applied."""
    layer_idx = module.layer_idx
    assert isinstance(layer_idx, int)
    out = attend(
        layer_idx,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Scoring(
            scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
            alibi_slopes=getattr(module, "alibi_slopes", None),
            sliding_window=sliding_window,
            softcap=softcap,
        ),
    )
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _paged_attention)
