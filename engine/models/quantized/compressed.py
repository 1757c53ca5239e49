"""compressed-tensors, written by llm-compressor: packed integers and floats, per group of layers.

Source: the compressed-tensors package, `QuantizationArgs` and its compressors.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.quantized.float4 import MXFP4_GROUP, doubled_float4, mxfp4_weight
from pagemill.engine.models.quantized.float8 import FLOAT8, float8_weight
from pagemill.engine.models.quantized.scheme import (
    INTEGER_SIZES,
    Parts,
    Scheme,
    choice,
    even_groups,
    group_size_of,
    setting,
)
from pagemill.engine.models.quantized.words import unpacked
from pagemill.kernels.types.grouped_weight import GroupedWeight

_STRATEGIES = ("tensor", "channel", "group", "block")
_NVFP4_GROUP = 16
_BITS = {"pack-quantized": INTEGER_SIZES, "mxfp4-pack-quantized": (4,), "nvfp4-pack-quantized": (4,)}


@dataclass(frozen=True, slots=True)
class _Group:
    """Layers with the same storage format."""

    targets: tuple[str, ...]
    layout: str
    bits: int
    strategy: str
    group_size: int
    block: tuple[int, int] | None
    is_symmetric: bool

    def names(self, module: str) -> bool:
        """Return True if a target is this module's name, not its class."""
        return any(
            re.match(target[3:], module) if target.startswith("re:") else module == target
            for target in self.targets
        )

    def size(self, in_features: int) -> int:
        return self.group_size if self.strategy == "group" else in_features

    def describe(self) -> str:
        extent = {"group": f"groups of {self.group_size}", "block": f"blocks of {self.block}"}
        kind = "symmetric" if self.is_symmetric else "with zero points"
        return f"{self.layout}, {self.bits} bits, {extent.get(self.strategy, self.strategy)}, {kind}"


class CompressedTensors(Scheme):
    method, main = "compressed-tensors", "weight_scale"
    parts = ("weight", "weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx",
             "weight_global_scale", "input_scale", "input_zero_point", "input_global_scale", "output_scale",
             "output_zero_point")  # fmt: skip

    def __init__(self, config: Mapping[str, Any]) -> None:
        for name in ("sparsity_config", "transform_config"):
            if (part := config.get(name)) and not _is_dense(part):
                raise ModelLoadError(
                    f"{name} of quantization_config is not supported; give the original checkpoint"
                )
        groups = setting(config, "config_groups", dict, {})
        self._groups = [_group(group, config) for group in groups.values() if _has_weights(group)]
        if not self._groups:
            raise ModelLoadError("can't read quantization_config: config_groups has no weights")

    def describe(self) -> str:
        return f"{self.method}: {'; '.join(group.describe() for group in self._groups)}"

    def is_quantized(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        found = tensors.get("weight")
        is_stored = "weight_packed" in tensors or "weight_scale" in tensors
        return is_stored or (found is not None and found.dtype in (FLOAT8, torch.int8))

    def weight(self, parts: Parts) -> QuantizedWeight:
        named = [group for group in self._groups if group.names(parts.module)]
        group = (named or self._groups)[0]
        return _READERS[group.layout](parts, group)


def _is_dense(part: Any) -> bool:
    return isinstance(part, dict) and (part.get("format") == "dense" or part.get("config_groups") == {})


def _has_weights(group: Any) -> bool:
    return isinstance(group, dict) and bool(group.get("weights"))


def _group(group: Mapping[str, Any], config: Mapping[str, Any]) -> _Group:
    weights = setting(group, "weights", dict)
    layout = choice(group if group.get("format") else config, "format", tuple(_READERS))
    strategy = choice(
        weights,
        "strategy",
        (*_STRATEGIES, "tensor_group"),
        "group" if weights.get("group_size") else "tensor",
    )
    block = weights.get("block_structure")
    if strategy == "block" and not (isinstance(block, list) and len(block) == 2):
        raise ModelLoadError(f"can't read quantization_config: block_structure is {block!r}")
    return _Group(
        targets=tuple(map(str, setting(group, "targets", list, []))),
        layout=layout,
        bits=choice(weights, "num_bits", _BITS.get(layout, (8,))),
        strategy=strategy,
        group_size=group_size_of(weights) if strategy == "group" else -1,
        block=(int(block[0]), int(block[1])) if strategy == "block" else None,
        is_symmetric=setting(weights, "symmetric", bool, default=True),
    )


def _read_packed(parts: Parts, group: _Group) -> QuantizedWeight:
    """Unsigned integers in 32-bit words along the inputs, zero points along the outputs."""
    packed = parts.take("weight_packed", (torch.int32,), (None, None))
    shape = parts.take("weight_shape", (torch.int64, torch.int32), (2,)).tolist()
    in_word = 32 // group.bits
    out_features, in_features = shape
    if min(shape) < 1 or packed.shape != (out_features, -(-in_features // in_word)):
        raise ModelLoadError(
            f"{parts.module}.weight_packed has shape {list(packed.shape)}, "
            f"weight_shape has {shape} of {group.bits} bits"
        )
    size = group.size(in_features)
    scales = _integer_scales(parts, group, (out_features, in_features))
    middle = 2 ** (group.bits - 1)
    zeros = torch.full((1, 1), middle, dtype=torch.int16).expand(scales.shape)
    if not group.is_symmetric:
        words = parts.take(
            "weight_zero_point", (torch.int32,), (-(-out_features // in_word), scales.shape[1])
        )
        zeros = unpacked(words.t(), group.bits).t()[:out_features].short()
    order = parts.group_order("weight_g_idx", in_features, size)

    def read() -> GroupedWeight:
        codes = unpacked(packed, group.bits)[:, :in_features]
        return GroupedWeight(
            codes.contiguous() if order is None else codes[:, order],
            even_groups(scales.float(), in_features, size).contiguous(),
            even_groups(zeros, in_features, size).contiguous(),
            order,
            bits=max(4, group.bits),
        )

    return parts.weight(out_features, in_features, read)


def _integer_scales(parts: Parts, group: _Group, shape: tuple[int, int]) -> torch.Tensor:
    """Return scales [out_features, num_groups]."""
    out_features, in_features = shape
    num_groups = -(-in_features // group.size(in_features))
    if group.strategy == "tensor":
        return parts.scales("weight_scale", (), (1,), (1, 1)).reshape(1, 1).expand(out_features, 1)
    shapes: list[tuple[int, ...]] = [(out_features, num_groups)]
    if num_groups == 1:
        shapes.append((out_features,))
    return parts.scales("weight_scale", *shapes).reshape(out_features, num_groups)


def _read_integers(parts: Parts, group: _Group) -> QuantizedWeight:
    codes = parts.take("weight", (torch.int8,), (None, None))
    out_features, in_features = codes.shape
    size = group.size(in_features)
    scales = _integer_scales(parts, group, (out_features, in_features))
    zeros = None
    if not group.is_symmetric:
        found = parts.take("weight_zero_point", (torch.int8,), (1,), (out_features,), (None, None))
        zeros = found.short().reshape(-1, 1 if found.ndim == 1 else found.shape[1]).expand(scales.shape)

    def read() -> GroupedWeight:
        return GroupedWeight(
            codes,
            even_groups(scales.float(), in_features, size).contiguous(),
            None if zeros is None else even_groups(zeros, in_features, size).contiguous(),
        )

    return parts.weight(out_features, in_features, read)


def _read_float8(parts: Parts, group: _Group) -> QuantizedWeight:
    block = group.block
    if group.strategy == "group":
        block = (1, group.group_size)
    return float8_weight(parts, "weight_scale", block)


def _read_plain(parts: Parts, group: _Group) -> QuantizedWeight:
    is_float = parts.tensors["weight"].dtype is FLOAT8 if "weight" in parts else False
    return (_read_float8 if is_float else _read_integers)(parts, group)


def _read_mxfp4(parts: Parts, group: _Group) -> QuantizedWeight:
    packed = parts.take("weight_packed", (torch.uint8,), (None, None))
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    scales = parts.take(
        "weight_scale", (torch.uint8, torch.float8_e8m0fnu), (out_features, in_features // MXFP4_GROUP)
    )
    return mxfp4_weight(parts, packed, scales.view(torch.uint8))


def _read_nvfp4(parts: Parts, group: _Group) -> QuantizedWeight:
    """Groups of 16 with e4m3 scales, which are divided by a scale of the tensor."""
    packed = parts.take("weight_packed", (torch.uint8,), (None, None))
    out_features, in_features = packed.shape[0], 2 * packed.shape[1]
    scales = parts.take("weight_scale", (FLOAT8,), (out_features, in_features // _NVFP4_GROUP))
    whole = parts.scales("weight_global_scale", (1,), ())

    def read() -> GroupedWeight:
        return GroupedWeight(doubled_float4(packed), scales.float() / whole.float() / 2)

    return parts.weight(out_features, in_features, read)


_READERS: Mapping[str, Callable[[Parts, _Group], QuantizedWeight]] = {
    "pack-quantized": _read_packed,
    "int-quantized": _read_integers,
    "float-quantized": _read_float8,
    "naive-quantized": _read_plain,
    "mxfp4-pack-quantized": _read_mxfp4,
    "nvfp4-pack-quantized": _read_nvfp4,
}
