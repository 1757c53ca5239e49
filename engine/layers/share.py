"""Assigns parts of tensors to ranks, by the plan that transformers' models carry."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.quantized_weight import Weight, inputs_of, joined, outputs_of

COLUMNS, ROWS = "colwise", "rowwise"
"""transformers' terms. Columns: a rank has some of the outputs. Rows: it has some of the inputs, and the
ranks' results are summed."""
_REPLICATED = ("replicated_with_grad_allreduce",)
# Phi 3's layers that hold several projections in one, and those that read their output. transformers has
# every rank gather the whole product, because a plain cut of it would give one rank the queries and the next
# one the keys. Here each projection in it is cut separately, so that a rank continues with its own heads and
# channels.
_MERGED, _BEHIND_MERGED = "colwise_gather_output", "rowwise_split_input"
_MERGED_LAYERS = ("qkv_proj", "gate_up_proj")
_EXPERTS = re.compile(r"\.experts(\.|$)")


@dataclass(frozen=True, slots=True)
class Share:
    """Rank `rank`'s part of a model spread over `size` ranks."""

    rank: int
    size: int

    def of(self, count: int) -> slice:
        """Return a part of `count` items, as even as possible: the first ranks take the remainder, one each."""
        each, more = divmod(count, self.size)
        begin = self.rank * each + min(self.rank, more)
        return slice(begin, begin + each + (self.rank < more))

    def of_kv_heads(self, count: int) -> slice:
        """Return a part of `count` KV heads; several ranks share a head if there are fewer heads than ranks."""
        if count >= self.size:
            return self.of(count)
        head = self.rank * count // self.size
        return slice(head, head + 1)


class ShardingPlan:
    """A model's plan: the linear layers that are split, and along which side."""

    def __init__(self, styles: Mapping[str, str], share: Share, num_heads: int, num_kv_heads: int) -> None:
        """`styles`: by module name, with a * for the number of a layer."""
        self.share = share
        self.num_heads = num_heads // share.size
        """The rank's own, as is `num_kv_heads`."""
        kv_heads = share.of_kv_heads(num_kv_heads)
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self._all_heads, self._all_kv_heads = num_heads, num_kv_heads
        self._styles = [
            (re.compile(rf"(?:^|\.){re.escape(name).replace(re.escape('*'), '[0-9]+')}$"), style)
            for name, style in styles.items()
            if style not in _REPLICATED
        ]

    def style(self, module_name: str) -> str | None:
        """Return a module's split; None: every rank has all of it."""
        return next((style for pattern, style in self._styles if pattern.search(module_name)), None)

    def outputs(self, module_name: str, count: int) -> list[slice]:
        """Return a rank's parts of a column-parallel layer's outputs, in order."""
        match module_name.rpartition(".")[2]:
            case "k_proj" | "v_proj":
                return [self._kv_outputs(0, count // self._all_kv_heads)]
            case "qkv_proj":
                head_size = count // (self._all_heads + 2 * self._all_kv_heads)
                keys = self._all_heads * head_size
                values = keys + self._all_kv_heads * head_size
                queries = self.share.of(keys)
                return [queries, self._kv_outputs(keys, head_size), self._kv_outputs(values, head_size)]
            case "gate_up_proj":
                gate = self.share.of(count // 2)
                return [gate, slice(gate.start + count // 2, gate.stop + count // 2)]
        return [self.share.of(count)]

    def _kv_outputs(self, begin: int, head_size: int) -> slice:
        """Return the outputs of a rank's KV heads in a projection that begins at output `begin`."""
        heads = self.share.of_kv_heads(self._all_kv_heads)
        return slice(begin + heads.start * head_size, begin + heads.stop * head_size)

    def cut(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """Cut a checkpoint's tensors to a rank's share. Only the part kept of a mapped file is ever read."""
        return {name: self._cut(name, tensor) for name, tensor in tensors.items()}

    def _cut(self, name: str, tensor: Weight) -> Weight:
        module_name, _, kind = name.rpartition(".")
        match self.style(module_name):
            case "colwise":
                parts = self.outputs(module_name, tensor.shape[0])
                return joined([outputs_of(tensor, part) for part in parts])
            case "rowwise" if kind == "weight":
                return inputs_of(tensor, self.share.of(tensor.shape[1]))
        return tensor


def sharding_plan(model_config: Any, share: Share, num_kv_heads: int) -> ShardingPlan:
    """Return the plan of one of transformers' causal language models, checked against its sizes.

    The head over the vocabulary is not in it: `sharded_linear.GatheredHead` splits that, tied to the
    embeddings or not.

    Raises:
        ConfigError: the model has no plan, or an unsupported one, or a number does not divide.
    """
    planned: dict[str, str] = dict(getattr(model_config, "base_model_tp_plan", None) or {})
    styles = {
        name: _without_gathering(name, style)
        for name, style in planned.items()
        if not _EXPERTS.search(name)  # cut as they are read: `pagemill.engine.models.expert_tensors`
    }
    kind = model_config.model_type
    if not styles:
        raise ConfigError(
            f"tensor_parallel_size={share.size}: transformers has no tensor parallel plan for {kind} models; use 1"
        )
    unknown = sorted(set(styles.values()) - {COLUMNS, ROWS, *_REPLICATED})
    if unknown:
        raise ConfigError(
            f"tensor_parallel_size={share.size}: the tensor parallel plan of {kind} models asks for {unknown[0]!r}, "
            "which is not supported; use 1"
        )
    _check_sizes(model_config, share.size, num_kv_heads)
    return ShardingPlan(styles, share, model_config.num_attention_heads, num_kv_heads)


def _without_gathering(name: str, style: str) -> str:
    """Return a layer's style when the projections merged in it are cut one by one."""
    if style == _MERGED and name.rpartition(".")[2] in _MERGED_LAYERS:
        return COLUMNS
    return ROWS if style == _BEHIND_MERGED else style


def _check_sizes(model_config: Any, size: int, num_kv_heads: int) -> None:
    for name in ("num_attention_heads", "intermediate_size"):
        count = getattr(model_config, name)
        if count % size:
            raise ConfigError(f"tensor_parallel_size={size} does not divide the model's {name} of {count}")
    if num_kv_heads % size and size % num_kv_heads:
        raise ConfigError(
            f"tensor_parallel_size={size} neither divides the model's {num_kv_heads} KV heads nor is a multiple of them"
        )
    if model_config.vocab_size < size:
        raise ConfigError(
            f"tensor_parallel_size={size} is more than the model's vocab_size of {model_config.vocab_size}"
        )
