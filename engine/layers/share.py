"""Assigns parts of tensors to ranks, by a family's declaration or transformers' plan for the model."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch

from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.quantized_weight import Weight, inputs_of, joined, outputs_of

_EXPERTS = re.compile(r"\.experts(\.|$)")
_FEED_FORWARD = re.compile(r"\.(mlp|feed_forward)(\.|$)")


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


Section = Literal["heads", "kv_heads", "channels"]
"""Outputs by their unit of division: query heads, KV heads, or single channels."""


@dataclass(frozen=True, slots=True)
class Columns:
    """A layer whose outputs are divided among the ranks."""

    sections: tuple[Section, ...]
    """The projections in it, in order; each is cut separately."""
    by_kv_head: bool = False
    """True if the sections repeat for each KV head: its query heads, its key, its value."""


@dataclass(frozen=True, slots=True)
class Rows:
    """A layer whose inputs are divided among the ranks; their results are summed."""


Cut = Columns | Rows
CHANNELS, KV_HEADS, MERGED_MLP = (
    Columns(("channels",)),
    Columns(("kv_heads",)),
    Columns(("channels", "channels")),
)
MERGED_QKV = Columns(("heads", "kv_heads", "kv_heads"))
QKV_BY_KV_HEAD = Columns(MERGED_QKV.sections, by_kv_head=True)
INPUTS = Rows()
_STYLES: dict[str, Cut] = {"colwise": CHANNELS, "rowwise": INPUTS}
"""transformers' terms."""
_REPLICATED = ("replicated_with_grad_allreduce", "embedding_rowwise")
"""Styles of modules replicated on every rank: norms of heads, and embeddings tied to the head."""
_KV_PROJECTIONS = ("k_proj", "v_proj")


def _intermediate_size(model_config: Any) -> int:
    return int(model_config.intermediate_size)


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorSplit:
    """A family's declaration of how its layers are divided among ranks."""

    layers: Mapping[str, Cut]
    """By module name, with a * for the index of a layer. Other modules are replicated on every rank."""
    intermediate_size: Callable[[Any], int] = _intermediate_size
    """Computed from a configuration, like `blocks`."""
    blocks: Callable[[Any], int] | None = None
    """Returns the number of blocks of heads whose projections are stored together; ranks have complete blocks."""
    head_counts: tuple[str, ...] = ()
    """Attributes of the modules around these layers that count query heads."""
    kv_head_counts: tuple[str, ...] = ()
    head_widths: tuple[str, ...] = ()
    """Attributes that hold the width of all query heads together."""
    counts_in_config: bool = False
    """True if attention reads its head counts from its configuration."""
    has_transposed_weights: bool = False
    """True if the layers' weights are stored as [in_features, out_features] (GPT-2's Conv1D)."""


class ShardingPlan:
    """A model's linear layers that are split, and a rank's part of each."""

    def __init__(self, split: TensorSplit, share: Share, num_heads: int, num_kv_heads: int) -> None:
        """`num_heads` and `num_kv_heads` are those of the complete model."""
        self.split, self.share = split, share
        self.num_heads = num_heads // share.size
        """The rank's number, like `num_kv_heads`."""
        kv_heads = share.of_kv_heads(num_kv_heads)
        self.num_kv_heads = kv_heads.stop - kv_heads.start
        self._all_heads, self._all_kv_heads = num_heads, num_kv_heads
        self._layers = [
            (re.compile(rf"(?:^|\.){re.escape(name).replace(re.escape('*'), '[0-9]+')}$"), layer)
            for name, layer in split.layers.items()
        ]

    def layer(self, module_name: str) -> Cut | None:
        """Return a module's split; None if every rank has all of it."""
        return next((layer for pattern, layer in self._layers if pattern.search(module_name)), None)

    def missing(self, module_names: Iterable[str]) -> list[str]:
        """Return the split layers that a model with these modules lacks.

        If there are experts, every layer may have them; the plan's dense layers are then absent.
        """
        names = list(module_names)
        found = {
            layer: any(pattern.search(name) for name in names)
            for (pattern, _), layer in zip(self._layers, self.split.layers, strict=True)
        }
        if any(_EXPERTS.search(name) for name in names):
            present = {layer.rpartition(".")[0] for layer, is_there in found.items() if is_there}
            found |= {
                layer: True
                for layer in found
                if _FEED_FORWARD.search(layer) and layer.rpartition(".")[0] not in present
            }
        return [layer for layer, is_there in found.items() if not is_there]

    def outputs(self, columns: Columns, count: int) -> list[slice]:
        """Return a rank's parts of a layer's outputs, in order."""
        return self._by_kv_head(count) if columns.by_kv_head else self._by_section(columns.sections, count)

    def _by_section(self, sections: tuple[Section, ...], count: int) -> list[slice]:
        sizes = {"heads": self._all_heads, "kv_heads": self._all_kv_heads, "channels": 1}
        width = count // sum(sizes[section] for section in sections)
        begin, parts = 0, []
        for section in sections:
            end = begin + sizes[section] * width
            if section == "kv_heads":
                heads = self.share.of_kv_heads(self._all_kv_heads)
                part = slice(heads.start * width, heads.stop * width)
            else:
                part = self.share.of(end - begin)
            parts.append(slice(begin + part.start, begin + part.stop))
            begin = end
        return parts

    def _by_kv_head(self, count: int) -> list[slice]:
        group = self._all_heads // self._all_kv_heads
        head_size = count // (self._all_kv_heads * (group + 2))
        heads, kv_heads = self.share.of(self._all_heads), self.share.of_kv_heads(self._all_kv_heads)
        parts = []
        for kv_head in range(kv_heads.start, kv_heads.stop):
            first = kv_head * group
            own = max(heads.start, first) - first, min(heads.stop, first + group) - first
            begin = kv_head * (group + 2)
            for start, stop in (own, (group, group + 2)):
                parts.append(slice((begin + start) * head_size, (begin + stop) * head_size))
        return _without_seams(parts)

    def cut(self, tensors: Mapping[str, Weight]) -> dict[str, Weight]:
        """Cut a checkpoint's tensors to a rank's share. Only this part is read from a mapped file."""
        return {name: self._cut(name, tensor) for name, tensor in tensors.items()}

    def _cut(self, name: str, tensor: Weight) -> Weight:
        module_name, _, kind = name.rpartition(".")
        layer = self.layer(module_name)
        is_transposed = self.split.has_transposed_weights and kind == "weight"
        if layer is not None and is_transposed and isinstance(tensor, torch.Tensor):
            tensor = tensor.t()
        if isinstance(layer, Columns):
            return joined([outputs_of(tensor, part) for part in self.outputs(layer, tensor.shape[0])])
        if isinstance(layer, Rows) and kind == "weight":
            return inputs_of(tensor, self.share.of(tensor.shape[1]))
        return tensor


def _without_seams(parts: list[slice]) -> list[slice]:
    """Merge consecutive parts, so that they are one view of a mapped file."""
    merged = parts[:1]
    for part in parts[1:]:
        if part.start == merged[-1].stop:
            merged[-1] = slice(merged[-1].start, part.stop)
        else:
            merged.append(part)
    return merged


def planned_split(model_config: Any) -> TensorSplit:
    """Return transformers' planned split of one of its causal language models.

    It does not include the head over the vocabulary: `sharded_linear.GatheredHead` splits that, tied to the
    embeddings or not.

    Raises:
        ConfigError: the model has no plan, or an unsupported one.
    """
    planned: dict[str, str] = dict(getattr(model_config, "base_model_tp_plan", None) or {})
    # Experts are cut when they are read: `pagemill.engine.models.expert_tensors`.
    planned = {name: style for name, style in planned.items() if not _EXPERTS.search(name)}
    kind = model_config.model_type
    if not planned:
        raise ConfigError(
            f"tensor_parallel_size: neither Pagemill nor transformers has a plan to split {kind} models; use 1",
            setting="tensor_parallel_size",
        )
    unknown = sorted(set(planned.values()) - {*_STYLES, *_REPLICATED})
    if unknown:
        raise ConfigError(
            f"tensor_parallel_size: the tensor parallel plan of {kind} models asks for {unknown[0]!r}, "
            "which is not supported; use 1",
            setting="tensor_parallel_size",
        )
    layers: dict[str, Cut] = {name: _STYLES[style] for name, style in planned.items() if style in _STYLES}
    for name in layers:
        if name.rpartition(".")[2] in _KV_PROJECTIONS:
            layers[name] = KV_HEADS
    return TensorSplit(layers=layers)
