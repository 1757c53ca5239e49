"""The tensors of a checkpoint's experts, kept out of the module and read when products are made of them.

transformers would stack the tensors of single experts into new ones, and hold both while it loads. Here the module gets
placeholders that take no memory, and each expert is read from the mapped file as it is packed.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch

from pagemill.engine.layers.experts.experts import StoredExperts, experts_modules
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight, dense, inputs_of, outputs_of
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.share import Share
from pagemill.engine.models.mapped_pages import MappedPages

_ONE = re.compile(r"^(.*)\.experts\.(\d+)\.(w1|w2|w3|gate_proj|up_proj|down_proj)\.weight$")
_PARTS = {"w1": "gate", "gate_proj": "gate", "w3": "up", "up_proj": "up", "w2": "down", "down_proj": "down"}
_STACKED = {
    ".experts.gate_up_proj": "gate_up",
    ".experts.down_proj": "down",
    ".input_linear.weight": "gate_up",  # Granite's
    ".output_linear.weight": "down",
}
_OLD_BLOCK = ".block_sparse_moe"
Found = dict[str, Any]
"""A block's `gate`, `up` and `down`, a weight by expert; or its `gate_up` and `down`, of all experts in one."""


class ExpertTensors:
    """Experts by block. A block with a part missing is left to transformers, whose loading says what is missing."""

    def __init__(self, tensors: Mapping[str, Weight], dtype: torch.dtype) -> None:
        """`dtype`: the module's."""
        self._dtype = dtype
        found: dict[str, Found] = defaultdict(lambda: defaultdict(dict))
        names: dict[str, list[str]] = defaultdict(list)
        for name, tensor in tensors.items():
            if match := _ONE.match(name):
                block, expert, part = match.groups()
                found[block][_PARTS[part]][int(expert)] = tensor
            elif part := _stacked_part(name, tensor):
                block = next(name.removesuffix(end) for end in _STACKED if name.endswith(end))
                found[block][part] = tensor
            else:
                continue
            names[block].append(name)
        self._blocks = {block: parts for block, parts in found.items() if _is_whole(parts)}
        taken = {name for block in self._blocks for name in names[block]}
        self.others: dict[str, Weight] = {name: t for name, t in tensors.items() if name not in taken}
        """The remaining tensors, with placeholders for what has been taken."""
        for block, parts in self._blocks.items():
            inner, down = _shapes(parts)
            self.others[f"{block}.experts.gate_up_proj"] = torch.zeros((), dtype=dtype).expand(inner)
            self.others[f"{block}.experts.down_proj"] = torch.zeros((), dtype=dtype).expand(down)

    def place(self, module: Any, share: Share, group: RankGroup | None) -> None:
        """Give the experts modules of a loaded model their weights, or a rank's share of these."""
        modules = {_block_of(path): part for path, part in experts_modules(module).items()}
        for block in self._blocks:
            experts = modules[_block_of(f"{block}.experts")]
            for name in ("gate_up_proj", "down_proj"):
                experts.register_parameter(name, None)
            experts.stored = self.stored(block, share, group)

    def stored(self, block: str, share: Share, group: RankGroup | None) -> StoredExperts:
        """Return a block's experts, or a rank's share of the channels of each."""
        parts = self._blocks[block]
        (count, inner, hidden), _ = _shapes(parts)
        channels = share.of(inner // 2)
        width = channels.stop - channels.start
        ups = slice(channels.start + inner // 2, channels.stop + inner // 2)

        def read_inner(expert: int) -> list[Weight]:
            if "gate_up" in parts:
                return (
                    [parts["gate_up"][expert]]
                    if share.size == 1
                    else [parts["gate_up"][expert][channels], parts["gate_up"][expert][ups]]
                )
            return [outputs_of(parts[part][expert], channels) for part in ("gate", "up")]

        def read_down(expert: int) -> list[Weight]:
            weight = parts["down"][expert]
            return [weight if share.size == 1 else inputs_of(weight, channels)]

        return StoredExperts(
            ExpertMatrices(count, 2 * width, hidden, self._dtype, _Reader(read_inner)),
            ExpertMatrices(count, hidden, width, self._dtype, _Reader(read_down)),
            group,
        )


def _stacked_part(name: str, tensor: Weight) -> str | None:
    if isinstance(tensor, QuantizedWeight) or tensor.ndim != 3:
        return None
    return next((part for end, part in _STACKED.items() if name.endswith(end)), None)


def _is_whole(parts: Found) -> bool:
    if parts.keys() == {"gate_up", "down"}:
        return True
    if parts.keys() != {"gate", "up", "down"}:
        return False
    numbers = set(range(len(parts["down"])))
    return all(
        found.keys() == numbers and len({tuple(weight.shape) for weight in found.values()}) == 1
        for found in parts.values()
    )


def _shapes(parts: Found) -> tuple[tuple[int, int, int], tuple[int, int, int]]:
    """Return the shapes that the stacked tensors have, or would have."""
    if "gate_up" in parts:
        return tuple(parts["gate_up"].shape), tuple(parts["down"].shape)
    count, (inner, hidden) = len(parts["gate"]), parts["gate"][0].shape
    return (count, inner + parts["up"][0].shape[0], hidden), (count, *parts["down"][0].shape)


def _block_of(path: str) -> str:
    return path.replace(_OLD_BLOCK, ".mlp")


class _Reader:
    """Reads an expert's parts as one weight; of the file, no more than one expert's stays in memory."""

    def __init__(self, parts: Callable[[int], list[Weight]]) -> None:
        self._parts, self._mapped = parts, MappedPages()
        self._last: list[Weight] = []

    def __call__(self, expert: int) -> torch.Tensor:
        for weight in self._last:
            if isinstance(weight, torch.Tensor):
                self._mapped.forget(weight)
        self._last = self._parts(expert)
        return dense(self._last)
