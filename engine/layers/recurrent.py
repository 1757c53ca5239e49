"""Recurrent layers, which store a state of fixed size per sequence in a slot, instead of keys and values.

Any module of transformers that stores its state in transformers' cache is supported. It is observed once: its writes
show the shapes of its state. Then it runs over a packed batch: rows with equal numbers of tokens form one batch,
whose states are gathered from their slots, passed to the module as its cache, and written back.
"""

from __future__ import annotations

import inspect
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.attention import find_context
from pagemill.engine.layers.library import (
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)
from pagemill.engine.layers.linear import adapter_rows
from pagemill.engine.layers.recurrent_rules import computes_in_slots, states_in_slots
from pagemill.kernels.types.low_rank import AdapterRows
from pagemill.kernels.types.recurrent import RecurrentStep, StateRows

RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Values of `layer_types` for layers with a state; hybrid ones attend as well."""
STATELESS_LAYERS = frozenset({"mlp", "moe"})
"""Values of `layer_types` for layers without a state or cache."""
_CACHE_NAMES = ("past_key_values", "cache_params")
_CONV, _RECURRENT = "conv_states", "recurrent_states"


@dataclass(frozen=True, slots=True)
class StateTensor:
    """One tensor of a recurrent layer's state."""

    kind: str
    """The attribute of transformers' cache layer that holds it."""
    index: int
    """Its index in that attribute."""
    shape: tuple[int, ...]
    """Shape for one sequence."""
    dtype: torch.dtype

    @property
    def num_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


StateShape = tuple[tuple[StateTensor, ...], ...]
"""The state tensors of each recurrent layer, in the order of a forward pass."""


def state_bytes(shape: StateShape) -> int:
    """Return the bytes of a sequence's state."""
    return sum(tensor.num_bytes for tensors in shape for tensor in tensors)


Parts = tuple[torch.Tensor | None, ...]
"""A module's output: one or several tensors, each with a row per token."""


class _StateLayer(LinearAttentionLayer):  # type: ignore[misc]
    """The states of one layer for a call's rows. transformers' class marks tensors for a compiler, a slow import."""

    def lazy_initialization(
        self,
        conv_states: torch.Tensor | None = None,
        recurrent_states: torch.Tensor | None = None,
        state_idx: int = 0,
        conv_kernel_size: int | None = None,
    ) -> None:
        if conv_states is not None:
            size = conv_states.shape[-1] if conv_kernel_size is None else conv_kernel_size
            self.conv_kernel_size[state_idx] = size
            self.conv_states[state_idx] = conv_states.new_zeros(*conv_states.shape[:-1], size)
            self.is_conv_states_initialized[state_idx] = True
        if recurrent_states is not None:
            self.recurrent_states[state_idx] = torch.zeros_like(recurrent_states)
            self.is_recurrent_states_initialized[state_idx] = True

    def fill(self, tensor: StateTensor, values: torch.Tensor) -> None:
        """Set one tensor to [num_rows, ...]: the rows have a previous state."""
        getattr(self, tensor.kind)[tensor.index] = values
        getattr(self, f"is_{tensor.kind}_initialized")[tensor.index] = True
        self.has_previous_state[tensor.index] = True
        if tensor.kind == _CONV:
            self.conv_kernel_size[tensor.index] = values.shape[-1]

    def tensors(self) -> tuple[StateTensor, ...]:
        """Return its tensors after a forward pass."""
        held = [
            (kind, index, values) for kind in (_CONV, _RECURRENT)
            for index, values in getattr(self, kind).items() if values is not None
        ]  # fmt: skip
        return tuple(
            StateTensor(kind, index, tuple(values.shape[1:]), values.dtype) for kind, index, values in held
        )


class _OneLayer(list[Any]):
    """A cache's list of layers in which all entries are the same layer."""

    def __init__(self, layer: _StateLayer) -> None:
        super().__init__([layer])

    def __getitem__(self, _index: Any) -> Any:
        return next(iter(self))

    def __len__(self) -> int:
        return 2**31


def _cache_of(layer: _StateLayer) -> Any:
    cache = DynamicCache()
    cache.layers = _OneLayer(layer)
    return cache


@dataclass(slots=True)
class RecurrentObservation:
    """Observation of a model's recurrent layers in a forward pass over a few tokens."""

    arguments: dict[str, Any]
    """Arguments of the model's forward pass: a cache, if it has recurrent layers."""
    mixers: dict[Any, tuple[_StateLayer, dict[str, Any]]] = field(default_factory=dict)
    """Module -> its states, and its arguments."""
    called: set[int] = field(default_factory=set)
    """The ids of the modules that were called."""
    _stack: list[tuple[Any, Any, Any]] = field(default_factory=list)

    def enter(self, module: Any, args: Any, kwargs: Any) -> None:
        self.called.add(id(module))
        self._stack.append((module, args, kwargs))

    def leave(self, *_: Any) -> None:
        self._stack.pop()

    def note(self, layer: _StateLayer) -> None:
        """Record that the running module writes to its state."""
        module, args, kwargs = self._stack[-1]
        if module not in self.mixers:
            call = inspect.signature(module.forward).bind(*args, **kwargs).arguments
            self.mixers[module] = layer, call


class _ObservedLayer(_StateLayer):
    observation: RecurrentObservation

    def update_conv_state(self, *args: Any, **kwargs: Any) -> Any:
        self.observation.note(self)
        return super().update_conv_state(*args, **kwargs)

    def update_recurrent_state(self, *args: Any, **kwargs: Any) -> Any:
        self.observation.note(self)
        return super().update_recurrent_state(*args, **kwargs)


class _ObservedHybrid(_ObservedLayer, CacheLayerMixin):  # type: ignore[misc]
    """The observed layer of a module that attends as well; its keys and values are not stored."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *_: Any, **__: Any) -> Any:
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0

    def get_seq_length(self) -> int:
        return 0

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        return -1


@contextmanager
def observed_states(module: Any) -> Iterator[RecurrentObservation]:
    """Observe the recurrent layers of a causal language model in the forward pass that is run inside the block."""
    observation = RecurrentObservation({"use_cache": False})
    if not recurrent_kinds(module.config):
        yield observation
        return
    cache = DynamicCache(config=module.config)
    count = getattr(module.config, "number_of_conv_states", 1)
    for number, layer in enumerate(cache.layers):
        if isinstance(layer, LinearAttentionCacheLayerMixin):
            kind = _ObservedHybrid if isinstance(layer, CacheLayerMixin) else _ObservedLayer
            cache.layers[number] = observed = kind(number_of_states=count)
            observed.observation = observation
    if not any(isinstance(layer, CacheLayerMixin) for layer in cache.layers):
        cache.layers.append(DynamicLayer())  # some models read the length from it
    parameters = inspect.signature(module.forward).parameters
    name = next((name for name in _CACHE_NAMES if name in parameters), _CACHE_NAMES[0])
    observation.arguments = {"use_cache": False, name: cache}
    hooks: list[Any] = []
    for part in module.modules():
        hooks.append(part.register_forward_pre_hook(observation.enter, with_kwargs=True))
        hooks.append(part.register_forward_hook(observation.leave, always_call=True))
    try:
        yield observation
    finally:
        for hook in hooks:
            hook.remove()


def recurrent_kinds(config: Any) -> frozenset[str]:
    """Return the values of `layer_types` in a configuration whose layers may have a state."""
    return frozenset(map(str, getattr(config, "layer_types", None) or ())) & RECURRENT_LAYERS


def serve_packed(observation: RecurrentObservation) -> StateShape:
    """Make the observed modules compute packed batches, in place; return the shape of a sequence's state."""
    packed: dict[type, type] = {}
    for number, (module, (layer, call)) in enumerate(observation.mixers.items()):
        for part in module.modules():
            # Code that reads a linear layer's weight requires the layer unchanged.
            if isinstance(part, torch.nn.Linear) and id(part) not in observation.called:
                vars(part)["is_read"] = True
        module.recurrent_number, module.state_tensors = number, layer.tensors()
        module.own_signature = inspect.signature(module.forward)
        module.cache_name = next(name for name in _CACHE_NAMES if name in module.own_signature.parameters)
        own: Any = type(module)
        module.computes_in_slots = computes_in_slots(module)
        if own not in packed:
            methods = {"forward": _forward_packed, "restarts": _restarts(module, own.forward, call)}
            packed[own] = type("PackedRecurrence", (own,), methods)
        module.__class__ = packed[own]
    return tuple(layer.tensors() for layer, _ in observation.mixers.values())


def _restarts(module: Any, own: Callable[..., Any], call: dict[str, Any]) -> bool:
    """Return True if several tokens always start from a zero recurrent state, regardless of the stored one."""
    if module.computes_in_slots or _hidden(call).is_meta:
        return False
    if all(tensor.kind == _CONV for tensor in module.state_tensors):
        return False
    outputs = []
    for value in (0.0, 1.0):
        layer = _StateLayer(number_of_states=len(module.state_tensors))
        for tensor in module.state_tensors:
            given = torch.full((1, *tensor.shape), value if tensor.kind == _RECURRENT else 0.0)
            layer.fill(tensor, given.to(tensor.dtype).to(_hidden(call).device))
        outputs.append(_run(module, own, call, layer))
    return all(one is None or torch.equal(one, other) for one, other in zip(*outputs, strict=True))


def _forward_packed(self: Any, *args: Any, **kwargs: Any) -> Any:
    """Compute a packed batch [1, num_tokens, width]; outside of a step, call the original module."""
    own = super(type(self), self).forward.__func__
    context = find_context()
    step: RecurrentStep | None = None if context is None else context.metadata.recurrent
    if step is None:
        return own(self, *args, **kwargs)
    call = self.own_signature.bind(*args, **kwargs).arguments
    states = step.states[self.recurrent_number]
    outputs: list[torch.Tensor | None] = []
    for rows in step.rows:
        parts = _compute_rows(self, own, call, rows, states)
        if not outputs:
            shape = (1, _hidden(call).shape[1])
            outputs = [None if part is None else part.new_zeros(*shape, *part.shape[2:]) for part in parts]
        for out, part in zip(outputs, parts, strict=True):
            if out is not None and part is not None:
                out[0, rows.tokens] = part.flatten(0, 1)
    return tuple(outputs) if self.returns_parts else outputs[0]


def _compute_rows(
    module: Any, own: Callable[..., Any], call: dict[str, Any], rows: StateRows, states: list[torch.Tensor]
) -> Parts:
    """Compute the outputs of rows, [num_rows, length, ...], and advance their states."""
    layer = _StateLayer(number_of_states=max(tensor.index for tensor in module.state_tensors) + 1)
    pairs = list(zip(module.state_tensors, states, strict=True))
    in_slots: AbstractContextManager[None] = nullcontext()
    if module.computes_in_slots:
        in_slots = next(states_in_slots(slots, rows) for tensor, slots in pairs if tensor.kind == _RECURRENT)
        pairs = [pair for pair in pairs if pair[0].kind != _RECURRENT]
    if not rows.is_new:
        for tensor, slots in pairs:
            layer.fill(tensor, slots[rows.slots])
    num_tokens, count = _hidden(call).shape[1], len(rows.slots)

    def of_rows(value: torch.Tensor) -> torch.Tensor:
        if value.ndim < 2 or value.shape[:2] != (1, num_tokens):
            return value
        return value[0, rows.tokens].reshape(count, rows.length, *value.shape[2:])

    given = _mapped(call, of_rows)
    if module.restarts and not rows.is_new and rows.length > 1:
        out = _one_by_one(module, own, given, layer, rows.row_adapters)
    else:
        # Some project one row before each sequence, such as zaya's delayed values.
        with adapter_rows(rows.adapters, rows.row_adapters), in_slots:
            out = _run(module, own, given, layer)
    for tensor, slots in pairs:
        slots[rows.slots] = getattr(layer, tensor.kind)[tensor.index].to(tensor.dtype)
    return out


def _one_by_one(
    module: Any,
    own: Callable[..., Any],
    call: dict[str, Any],
    layer: _StateLayer,
    adapters: AdapterRows | None,
) -> Parts:
    shape, outputs = _hidden(call).shape[:2], []
    for place in range(shape[1]):

        def at_place(value: torch.Tensor, place: int = place) -> torch.Tensor:
            return value[:, place : place + 1] if value.ndim > 1 and value.shape[:2] == shape else value

        with adapter_rows(adapters):
            outputs.append(_run(module, own, _mapped(call, at_place), layer))
    return tuple(
        None if parts[0] is None else torch.cat(parts, dim=1) for parts in zip(*outputs, strict=True)
    )


def _run(module: Any, own: Callable[..., Any], call: dict[str, Any], layer: _StateLayer) -> Parts:
    bound = inspect.BoundArguments(module.own_signature, OrderedDict(call))
    bound.arguments |= {module.cache_name: _cache_of(layer)}
    if "attention_mask" in module.own_signature.parameters:
        bound.arguments["attention_mask"] = None
    out = own(module, *bound.args, **bound.kwargs)
    module.returns_parts = isinstance(out, tuple)
    parts = out if isinstance(out, tuple) else (out,)
    shape = _hidden(call).shape[:2]
    if any(part is not None and part.shape[:2] != shape for part in parts):
        raise ModelLoadError("the recurrent layers return more than hidden states")
    return parts


def _hidden(call: dict[str, Any]) -> torch.Tensor:
    """Return a module's input: its first argument."""
    hidden = next(iter(call.values()))
    assert isinstance(hidden, torch.Tensor)
    return hidden


def _mapped(value: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with every tensor changed."""
    if isinstance(value, torch.Tensor):
        return change(value)
    if isinstance(value, dict):
        return {name: _mapped(each, change) for name, each in value.items()}
    return tuple(_mapped(each, change) for each in value) if isinstance(value, tuple) else value
