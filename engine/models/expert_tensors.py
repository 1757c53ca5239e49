"""The tensors of a checkpoint's experts, stored outside the module and read when matmuls are created.

transformers would stack the tensors of single experts into new ones, and hold both while it loads. Here the module has
placeholders without memory, and each expert is read from the mapped file when it is packed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.layers.experts.experts import StoredExperts, experts_modules
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.quantized_weight import Weight, dense, inputs_of, outputs_of
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.share import Share
from pagemill.engine.models.mapped_pages import MappedPages

_ONE = re.compile(r"^(.*)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$")
_PARTS = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
_ONE_MERGED = re.compile(r"^(.*)\.experts\.(gate_up|down)_proj\.(\d+)$")
"""The name of one expert's weight in a stack of quantized ones, [out_features, in_features]."""
_STACKED = {
    ".experts.gate_up_proj": "gate_up",
    ".experts.down_proj": "down",
    ".experts.gate_up_proj_bias": "gate_up_bias",
    ".experts.down_proj_bias": "down_bias",
    ".input_linear.weight": "gate_up",  # of Granite
    ".output_linear.weight": "down",
}
_PARAMETERS = {
    part: name.rpartition(".")[2] for name, part in reversed(_STACKED.items()) if ".experts." in name
}
_BIASES = {"gate_up_bias", "down_bias"}
_OLD_BLOCK = ".block_sparse_moe"
Found = dict[str, Any]
"""A block's `gate`, `up` and `down`, one weight per expert; or `gate_up` and `down`, in one tensor for all experts or
one weight per expert, and their biases."""


@dataclass(frozen=True, slots=True)
class ExpertLayout:
    """A module's layout of its experts' stacked tensors, in transformers' terms."""

    is_transposed: bool = False
    """[num_experts, in_features, out_features]"""
    is_interleaved: bool = False
    """Whether channels of the gate and up projections are interleaved, not concatenated."""

    @classmethod
    def from_experts(cls, experts: Any) -> ExpertLayout:
        return cls(bool(experts.is_transposed), not getattr(experts, "is_concatenated", True))

    def inner_rows(self, channels: slice, count: int) -> list[slice]:
        """Return the output indices of the merged projections for some of `count` channels."""
        if self.is_interleaved:
            return [slice(2 * channels.start, 2 * channels.stop)]
        if channels == slice(0, count):
            return [slice(0, 2 * count)]
        return [channels, slice(channels.start + count, channels.stop + count)]


class ExpertTensors:
    """Experts by block. A block with a missing part is left to transformers, which reports what is missing."""

    def __init__(self, tensors: Mapping[str, Weight], dtype: torch.dtype) -> None:
        """`dtype`: the module's dtype."""
        self._dtype = dtype
        found: dict[str, Found] = defaultdict(lambda: defaultdict(dict))
        names: dict[str, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            if match := _ONE.match(name):
                block, expert, part = match.groups()
                found[block][_PARTS[part]][int(expert)] = tensor
            elif match := _ONE_MERGED.match(name):
                block, part, expert = match.groups()
                found[block][part][int(expert)] = tensor
            elif part := _stacked_part(name, tensor):
                block = next(name.removesuffix(end) for end in _STACKED if name.endswith(end))
                found[block][part] = tensor
            else:
                continue
            names[block].append(name)
        self._blocks = {block: parts for block, parts in found.items() if _is_whole(parts)}
        taken = {name for block in self._blocks for name in names[block]}
        self.others: dict[str, Weight] = {name: t for name, t in tensors.items() if name not in taken}
        """The remaining tensors, with placeholders for the removed ones."""
        for block, parts in self._blocks.items():
            for part, shape in _shapes(parts).items():
                self.others[f"{block}.experts.{_PARAMETERS[part]}"] = torch.zeros((), dtype=dtype).expand(
                    shape
                )

    def place(self, module: Any, share: Share, group: RankGroup | None) -> None:
        """Assign weights, or a rank's share of them, to the experts modules of a loaded model."""
        modules = {_block_of(path): part for path, part in experts_modules(module).items()}
        for block in self._blocks:
            experts = modules[_block_of(f"{block}.experts")]
            for part in _shapes(self._blocks[block]):
                experts.register_parameter(_PARAMETERS[part], None)
            experts.stored = self.stored(block, share, group, ExpertLayout.from_experts(experts))

    def stored(
        self, block: str, share: Share, group: RankGroup | None, layout: ExpertLayout | None = None
    ) -> StoredExperts:
        """Return a block's experts, or a rank's share of their channels."""
        parts, layout = self._blocks[block], layout or ExpertLayout()
        hidden, all_channels = _matrix(parts["down"], 0, layout).shape
        channels = share.of(all_channels)
        width, rows = channels.stop - channels.start, layout.inner_rows(channels, all_channels)

        def read_inner(expert: int) -> list[Weight]:
            if "gate_up" not in parts:
                return [outputs_of(parts[part][expert], channels) for part in ("gate", "up")]
            weight = _matrix(parts["gate_up"], expert, layout)
            return [weight] if share.size == 1 else [outputs_of(weight, part) for part in rows]

        def read_down(expert: int) -> list[Weight]:
            weight = _matrix(parts["down"], expert, layout)
            return [weight if share.size == 1 else inputs_of(weight, channels)]

        def bias(part: str, columns: list[slice]) -> torch.Tensor | None:
            if (found := parts.get(part)) is None:
                return None
            return torch.cat([found[:, some] for some in columns], dim=1).to(self._dtype)

        count = len(parts["down"])
        return StoredExperts(
            ExpertMatrices(
                count, 2 * width, hidden, self._dtype, _Reader(read_inner), bias("gate_up_bias", rows)
            ),
            ExpertMatrices(
                count, hidden, width, self._dtype, _Reader(read_down), bias("down_bias", [slice(None)])
            ),
            group,
        )


def _stacked_part(name: str, tensor: Weight) -> str | None:
    part = next((part for end, part in _STACKED.items() if name.endswith(end)), None)
    num_dimensions = 2 if part in _BIASES else 3
    return part if isinstance(tensor, torch.Tensor) and tensor.ndim == num_dimensions else None


def _is_whole(parts: Found) -> bool:
    if parts.keys() - _BIASES not in ({"gate_up", "down"}, {"gate", "up", "down"}):
        return False
    numbers = set(range(len(parts["down"])))
    return all(
        found.keys() == numbers and len({tuple(weight.shape) for weight in found.values()}) == 1
        for found in parts.values()
        if isinstance(found, dict)
    )


def _shapes(parts: Found) -> dict[str, tuple[int, ...]]:
    """Return the actual or hypothetical shapes of the stacked tensors."""
    shapes = {part: tuple(found.shape) for part, found in parts.items() if isinstance(found, torch.Tensor)}
    if "gate" in parts:
        count, (inner, hidden) = len(parts["gate"]), parts["gate"][0].shape
        return {
            "gate_up": (count, inner + parts["up"][0].shape[0], hidden),
            "down": (count, *parts["down"][0].shape),
        }
    for part in ("gate_up", "down"):
        if part not in shapes:  # of gpt-oss, whose module stores them transposed
            shapes[part] = (len(parts[part]), *reversed(parts[part][0].shape))
    return shapes


def _matrix(part: Any, expert: int, layout: ExpertLayout) -> Weight:
    """Return an expert's weight [out_features, in_features]."""
    is_transposed = layout.is_transposed and isinstance(part, torch.Tensor)
    weight: Weight = part[expert].t() if is_transposed else part[expert]
    return weight


def _block_of(path: str) -> str:
    return path.replace(_OLD_BLOCK, ".mlp")


class _Reader:
    """Reads an expert's parts as one weight; no more than one expert of the file remains in memory."""

    def __init__(self, parts: Callable[[int], list[Weight]]) -> None:
        self._parts, self._mapped = parts, MappedPages()
        self._last: list[Weight] = []

    def __call__(self, expert: int) -> torch.Tensor:
        for weight in self._last:
            if isinstance(weight, torch.Tensor):
                self._mapped.forget(weight)
        self._last = self._parts(expert)
        return dense(self._last)
