"""Attention over texts concatenated in one batch, without padding or a cache.

Plugged into transformers' attention interface, like paged attention. On a GPU, one call of torch's FlashAttention
computes all texts, if it supports the layer. Otherwise each length requires one call of torch's attention on a view:
texts of equal length are adjacent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from pagemill.engine.layers.library import ALL_ATTENTION_FUNCTIONS
from pagemill.kernels.types.transfer import to_device

PACKED_ATTENTION = "pagemill_packed"
_MAX_HEAD_DIM = 256
_HEAD_DIM_STEP = 8

Bias = Callable[[int], torch.Tensor]
"""Maps a length to the bias of the scores, [num_heads, length, length]."""


@dataclass(frozen=True, slots=True)
class PackedTexts:
    """The division of a batch's tokens into texts."""

    groups: tuple[tuple[int, int], ...]
    """(number of texts, their length), in the order of the tokens."""
    starts: torch.Tensor | None = None
    """int32 [num_texts + 1] on a GPU: each text's first token, and the number of tokens. None on a CPU."""

    @classmethod
    def from_lengths(cls, lengths: Sequence[int], device: torch.device) -> PackedTexts:
        """`lengths` are in the order of the tokens; equal ones should be adjacent."""
        groups: list[tuple[int, int]] = []
        for length in lengths:
            if groups and groups[-1][1] == length:
                groups[-1] = groups[-1][0] + 1, length
            else:
                groups.append((1, length))
        if device.type == "cpu":
            return cls(tuple(groups))
        return cls(tuple(groups), to_device(np.cumsum([0, *lengths], dtype=np.int32), device))


@dataclass(frozen=True, slots=True)
class PackedScoring:
    """The scoring of queries and keys."""

    scale: float
    is_causal: bool = False
    window: int | None = None
    """A token sees tokens at a distance below this."""
    bias: Bias | None = None


_texts: ContextVar[PackedTexts] = ContextVar("packed_texts")


@contextmanager
def packed_texts(texts: PackedTexts) -> Iterator[None]:
    """Make attention inside the block attend within these texts."""
    token = _texts.set(texts)
    try:
        yield
    finally:
        _texts.reset(token)


def attend_packed(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: PackedScoring
) -> torch.Tensor:
    """Attend within each text.

    Args:
        query: [num_tokens, num_heads, head_dim]; key, value: [num_tokens, num_kv_heads, head_dim].

    Returns:
        [num_tokens, num_heads, head_dim].
    """
    texts = _texts.get()
    if texts.starts is not None and _is_flash(query, scoring):
        return _attend_at_once(query, key, value, scoring, texts)
    out = query.new_empty(query.shape)
    begin = 0
    for count, length in texts.groups:
        end = begin + count * length

        def of_texts(x: torch.Tensor, begin: int = begin, end: int = end, count: int = count) -> torch.Tensor:
            return x[begin:end].view(count, -1, *x.shape[1:]).transpose(1, 2)

        mask = _mask(scoring, length, query)
        attended = scaled_dot_product_attention(
            of_texts(query),
            of_texts(key),
            of_texts(value),
            attn_mask=mask,
            is_causal=scoring.is_causal and mask is None,
            scale=scoring.scale,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        of_texts(out).copy_(attended)
        begin = end
    return out


def _is_flash(query: torch.Tensor, scoring: PackedScoring) -> bool:
    """Return True if torch's FlashAttention computes such a layer."""
    head_dim = query.shape[-1]
    is_half = query.dtype in (torch.float16, torch.bfloat16)
    return is_half and scoring.bias is None and head_dim <= _MAX_HEAD_DIM and head_dim % _HEAD_DIM_STEP == 0


def _attend_at_once(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: PackedScoring, texts: PackedTexts
) -> torch.Tensor:
    """Attend within each text in one launch; see `attend_packed`."""
    longest = max(length for _, length in texts.groups)
    before = -1 if scoring.window is None else scoring.window - 1
    # The operator below `torch.nn.attention.varlen`, whose function for grouped queries differs by version.
    out, *_ = torch.ops.aten._flash_attention_forward(
        query,
        key,
        value,
        texts.starts,
        texts.starts,
        longest,
        longest,
        0.0,
        scoring.is_causal,
        False,
        scale=scoring.scale,
        window_size_left=before,
        window_size_right=0 if scoring.is_causal else before,
    )
    attended: torch.Tensor = out
    return attended


def _mask(scoring: PackedScoring, length: int, like: torch.Tensor) -> torch.Tensor | None:
    """Return the bias of the scores, [length, length] or [num_heads, length, length]; None: no bias."""
    bias = None if scoring.bias is None else scoring.bias(length).to(like.dtype)
    if scoring.window is None or scoring.window >= length:
        return bias
    place = torch.arange(length, device=like.device)
    away = place[:, None] - place[None, :]
    is_seen = away.abs() < scoring.window
    if scoring.is_causal:
        is_seen &= away >= 0
    mask = torch.zeros(length, length, dtype=like.dtype, device=like.device)
    mask.masked_fill_(~is_seen, float("-inf"))
    return mask if bias is None else mask + bias


def _packed_attention(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention function."""
    scoring = PackedScoring(
        query.shape[-1] ** -0.5 if scaling is None else scaling,
        is_causal=bool(getattr(module, "is_causal", True)),
        window=sliding_window,
    )
    out = attend_packed(query[0].transpose(0, 1), key[0].transpose(0, 1), value[0].transpose(0, 1), scoring)
    return out[None], None


ALL_ATTENTION_FUNCTIONS.register(PACKED_ATTENTION, _packed_attention)
