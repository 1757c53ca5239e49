"""Paged attention, plugged into transformers' attention interface.

The batch is flattened to [1, num_tokens]; the step's metadata maps tokens to sequences, and is passed to the
attention function in a context variable, because not every family forwards extra arguments to it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import count
from typing import TYPE_CHECKING, Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.library import ALL_ATTENTION_FUNCTIONS
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

if TYPE_CHECKING:
    from pagemill.engine.layers.media_step import MediaStep

PAGED_ATTENTION = "pagemill_paged"
PAGED_IN_ORDER = "pagemill_paged_in_order"
"""For any model: a forward pass's n-th attention uses the n-th cache, regardless of the layer's name."""
_WITHOUT_EFFECT = frozenset({"position_ids", "cache_position", "is_causal"})
"""Arguments without effect: the angles are already applied, and attention is causal."""


@dataclass(frozen=True, slots=True)
class AttentionContext:
    metadata: AttentionMetadata
    layers: list[LayerCache]
    read_tokens: torch.Tensor | None = None
    """[any] int64, ascending: the tokens whose last hidden states are read; None = all."""
    media: MediaStep | None = None
    """None: the step only computes text."""
    calls: Iterator[int] = field(default_factory=count)
    """The indices of a forward pass's attentions, for `PAGED_IN_ORDER`."""


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


def find_context() -> AttentionContext | None:
    """Return the context of the running step; None outside of a step."""
    return _context.get(None)


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
    check_window(layer_idx, cache, scoring)
    metadata = context.metadata.of_group(cache.group)
    dispatch.reshape_and_cache(key, value, cache, metadata.slot_mapping)
    return dispatch.paged_attention(query, cache, metadata, scoring)


def check_window(layer_idx: int, cache: LayerCache, scoring: Scoring) -> None:
    """Raise RuntimeError for a layer that would read freed blocks: this is a bug, never caused by input."""
    window = cache.window
    reads = scoring.sliding_window or 0
    if window is not None and reads != window and not 0 < reads <= window:
        raise RuntimeError(f"layer {layer_idx} reads {reads or 'all'} keys, its cache keeps {window}")


def check_windows(module: torch.nn.Module, layers: list[LayerCache]) -> None:
    """Run `check_window` once for attentions with known scoring: compiled layers do not call `attend`."""
    for part in module.modules():
        if isinstance(scoring := getattr(part, "scoring", None), Scoring):
            layer_idx: Any = part.layer_idx
            check_window(layer_idx, layers[layer_idx], scoring)


def refuse_unknown(attention_mask: Any, arguments: Mapping[str, Any]) -> None:
    """Reject unsupported attention. Raises `ModelLoadError` with the reason, without the model's name.

    Args:
        arguments: the arguments that a layer passes to its attention function in addition to `_attend_as`'s named ones.
    """
    if attention_mask is not None:
        raise ModelLoadError("the attention mask is neither causal nor a sliding window")
    for name, value in arguments.items():
        if name == "is_causal" and value is False:
            raise ModelLoadError("the attention is bidirectional")
        if value is not None and value is not False and name not in _WITHOUT_EFFECT:
            raise ModelLoadError(f"the attention takes {name}, which paged attention does not compute")


def _paged_attention(module: Any, *states: Any, **arguments: Any) -> tuple[torch.Tensor, None]:
    """Implement transformers' attention function; rotary embedding and QK norm are already applied."""
    return _attend_as(module, module.layer_idx, *states, **arguments)


def _paged_in_order(
    module: Any, query: torch.Tensor, *states: Any, **arguments: Any
) -> tuple[torch.Tensor, None]:
    """Implement the function for a module inspected by `pagemill.engine.layers.observation`."""
    arguments["sliding_window"] = module.observed_window
    index, latent = next(current_context().calls), getattr(module, "latent", None)
    if latent is None:
        return _attend_as(module, index, query, *states, **arguments)
    out, _ = _attend_as(module, index, latent.absorb(query), *states, **arguments)
    return latent.values(out), None


def _attend_as(
    module: Any,
    cache_index: int,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,  # [1, num_kv_heads, num_tokens, head_dim]
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,  # sinks [num_heads]
    **others: Any,
) -> tuple[torch.Tensor, None]:
    refuse_unknown(attention_mask, others)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    num_heads, value_dim = query.shape[1], value.shape[-1]
    cache = current_context().layers[cache_index]
    query, key, value = _widened(query, key, value, cache.num_kv_heads, cache.keys.shape[-1])
    out = attend(
        cache_index,
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        Scoring(
            scale=scale,
            alibi_slopes=getattr(module, "alibi_slopes", None),
            sliding_window=sliding_window,
            softcap=softcap,
            sinks=None if s_aux is None else padded_sinks(s_aux, query.shape[1]),
        ),
    )
    return out[None, :, :num_heads, :value_dim], None


def padded_sinks(sinks: torch.Tensor, num_heads: int) -> torch.Tensor:
    """Return a layer's sinks in the kernels' format; padding heads get zeros."""
    sinks = sinks.detach().float().contiguous()
    return sinks if len(sinks) == num_heads else torch.nn.functional.pad(sinks, (0, num_heads - len(sinks)))


def _widened(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_kv_heads: int, width: int
) -> tuple[torch.Tensor, ...]:
    """Pad heads and their number with zeros up to the cache's sizes, those of the model's widest layer."""
    group = query.shape[1] // key.shape[1]
    wanted = ((query, group * num_kv_heads), (key, num_kv_heads), (value, num_kv_heads))
    if all(state.shape[1] == heads and state.shape[-1] == width for state, heads in wanted):
        return query, key, value
    return tuple(
        torch.nn.functional.pad(state, (0, width - state.shape[-1], 0, 0, 0, heads - state.shape[1]))
        for state, heads in wanted
    )


ALL_ATTENTION_FUNCTIONS.register(PAGED_ATTENTION, _paged_attention)
ALL_ATTENTION_FUNCTIONS.register(PAGED_IN_ORDER, _paged_in_order)
