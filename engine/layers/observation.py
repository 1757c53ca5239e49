"""Observes how a model attends, in one forward pass over a few tokens with a recording attention function.

Used for models without a registered family. The arguments of the attention function, and the masks
requested from transformers, show whether paged attention would compute the same.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.attention import refuse_unknown
from pagemill.engine.layers.latent.shape import LatentShape
from pagemill.engine.layers.library import ALL_ATTENTION_FUNCTIONS, DynamicCache, register_mask_function
from pagemill.engine.layers.recurrent import (
    STATELESS_LAYERS,
    StateShape,
    observed_states,
    recurrent_kinds,
    serve_packed,
)
from pagemill.kernels.types.window import first_visible

_OBSERVED = "pagemill_observed"
_NUM_TOKENS = 3
_NO_ATTENTION = (1, 1, 1)
"""Heads of a model without attention layers: its cache does not have tensors."""
_NEAR = 64
_LONGEST = 2**20
"""Positions are compared up to this limit."""

MaskFunction = Callable[[Any, Any, Any, Any], Any]
"""transformers' (batch, head, query position, key position) -> whether the key is visible."""


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The attention shape of a model's widest layer, to which narrower ones are padded."""

    windows: tuple[int | None, ...]
    """Per attention of a forward pass, each with a separate cache: more than layers if some attend twice.
    None: it reads everything."""
    num_heads: int
    num_kv_heads: int
    head_dim: int
    """Width of keys or values."""
    latent: LatentShape | None = None
    """Shape of latents, which are cached as the keys of one KV head; None: keys and values are cached."""
    state: StateShape = ()
    """Observation of the recurrent layers."""


@dataclass(slots=True)
class _Observation:
    layers: set[int] = field(default_factory=set)
    """The ids of the modules that attend."""
    heads: list[tuple[int, int, int]] = field(default_factory=list)
    """Query heads per KV head, KV heads and their width, per call."""
    windows: list[int | None] = field(default_factory=list)
    """Window per call."""
    masks: list[tuple[torch.Tensor, MaskFunction]] = field(default_factory=list)

    def mask_function(self, mask: torch.Tensor | None) -> MaskFunction | None:
        """Return the function of a mask requested from transformers; a layer may pass a view of it."""
        if mask is None:
            return None
        for made, function in self.masks:
            if mask.shape == made.shape and mask.data_ptr() == made.data_ptr():
                return function
        return None


_observation: ContextVar[_Observation] = ContextVar("observation")


def observe_attention(module: Any, num_layers: int) -> AttentionShape:
    """Return the shape of every layer's attention, if paged attention can replace it.

    Raises:
        ModelLoadError: it cannot; the message is the reason, without the model's name.
    """
    register_mask_function(_OBSERVED, _observed_mask)
    token = _observation.set(observation := _Observation())
    device = next(module.parameters()).device
    positions = torch.arange(_NUM_TOKENS, device=device)[None]
    try:
        with (
            attending_by(module, _OBSERVED),
            torch.inference_mode(),
            observed_states(module) as states,
        ):
            module(input_ids=positions, position_ids=positions, **states.arguments)
        with torch.inference_mode():
            state = serve_packed(states)
    except AttributeError as error:
        if isinstance(error.obj, DynamicCache):
            raise ModelLoadError("the recurrent layers need a separate cache") from error
        raise
    finally:
        _observation.reset(token)
    if not observation.heads and not recurrent_kinds(module.config):
        raise ModelLoadError("the attention does not go through transformers' attention interface")
    kinds = getattr(module.config, "layer_types", None) or ()
    known = len(observation.layers) + len(state) + sum(kind in STATELESS_LAYERS for kind in kinds)
    if (others := num_layers - known) > 0:
        raise ModelLoadError(f"{others} of {num_layers} layers keep a state that is in no cache")
    groups, num_kv_heads, widths = zip(*(observation.heads or [_NO_ATTENTION]), strict=True)
    most = max(num_kv_heads)
    return AttentionShape(tuple(observation.windows), max(groups) * most, most, max(widths), state=state)


@contextmanager
def attending_by(module: Any, implementation: str) -> Iterator[None]:
    """Set the attention implementation of a model and of the models inside it until the end of the block."""
    configs: list[Any] = list({id(part.config): part.config for part in module.modules()
                               if hasattr(part, "config")}.values())  # fmt: skip
    before = [config._attn_implementation for config in configs]
    try:
        for config in configs:
            config._attn_implementation = implementation
        yield
    finally:
        for config, name in zip(configs, before, strict=True):
            config._attn_implementation = name


def attention_function(config: Any) -> Callable[..., Any] | None:
    """Return a stand-in for a module that does not use the interface; None: the module's attention is required."""
    name = config._attn_implementation
    return None if name == "eager" else ALL_ATTENTION_FUNCTIONS[name]


def _observed_attention(
    module: Any,
    query: torch.Tensor,  # [1, num_heads, num_tokens, head_dim]
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **others: Any,
) -> tuple[torch.Tensor, None]:
    """Inspect one layer's attention; return zeros."""
    observation = _observation.get()
    mask_function = observation.mask_function(attention_mask)
    refuse_unknown(attention_mask if mask_function is None else None, others)
    module.observed_window = _masked_window(module, mask_function, sliding_window, query.device)
    observation.windows.append(module.observed_window)
    if key.shape[2] != query.shape[2]:
        raise ModelLoadError("the attention reads keys of other tokens than its own")
    observation.layers.add(id(module))
    group, rest = divmod(query.shape[1], key.shape[1])
    if rest:
        raise ModelLoadError(f"{query.shape[1]} heads don't share {key.shape[1]} KV heads evenly")
    observation.heads.append((group, key.shape[1], max(key.shape[3], value.shape[3])))
    return value.new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None


def _observed_mask(**request: Any) -> torch.Tensor:
    lengths = (request["batch_size"], 1, request["q_length"], request["kv_length"])
    mask = torch.ones(lengths, dtype=torch.bool, device=request.get("device"))
    _observation.get().masks.append((mask, request["mask_function"]))
    return mask


def _masked_window(
    module: Any, mask_function: MaskFunction | None, declared: int | None, device: torch.device
) -> int | None:
    """Return a layer's mask window in the format of `first_visible`; None if it is causal.

    Some layers declare a window that differs from their mask.
    """
    if mask_function is None:
        if declared is not None or not getattr(module, "is_causal", True):
            raise ModelLoadError("the attention is bidirectional")
        return None
    config = getattr(module, "config", None)
    chunk, configured = (getattr(config, name, None) for name in ("attention_chunk_size", "sliding_window"))
    sizes = (declared, configured, None, -chunk if isinstance(chunk, int) else None)
    windows = {window for window in sizes if not isinstance(window, bool)}
    queries, keys, visible = _seen(mask_function, windows, device)
    if bool((visible & (keys > queries)).any()):
        raise ModelLoadError("the attention is bidirectional")
    for window in windows:
        if torch.equal(visible, (keys <= queries) & (keys >= first_visible(window or 0, queries))):
            return window
    raise ModelLoadError("the attention mask is neither causal nor the configured window")


def _seen(
    mask_function: MaskFunction, windows: set[int | None], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return query positions [n, 1], key positions [1, m], and whether a key is visible [n, m].

    A mask function may read tensors on the model's device.
    """
    queries, keys = _positions(windows)
    for place in dict.fromkeys((queries.device, device)):
        queries, keys = queries.to(place), keys.to(place)
        try:
            visible = torch.as_tensor(mask_function(0, 0, queries, keys))
            return queries, keys, visible.expand(len(queries), keys.shape[1])
        except Exception as error:  # the mask depends on the tokens, not only on positions
            failure = error
    raise ModelLoadError("the attention mask depends on more than positions") from failure


def _positions(windows: set[int | None]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return query positions [n, 1] and key positions [1, m] at all distances that distinguish masks."""
    powers = [2**exponent + offset for exponent in range(6, 21) for offset in (-1, 0, 1)]
    edges = [abs(window) + offset for window in windows if window for offset in (-1, 0, 1)]
    queries = sorted({*range(_NEAR), *powers, *edges, 3 * _LONGEST // 4})
    distances = [0, -1, 1, -2, *edges]
    keys = sorted({query - distance for query in queries for distance in distances if query >= distance})
    return torch.tensor(queries)[:, None], torch.tensor(keys)[None]


ALL_ATTENTION_FUNCTIONS.register(_OBSERVED, _observed_attention)
