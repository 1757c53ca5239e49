"""MXFP4 and NVFP4: e2m1 values, two per byte, the first one low, in groups with a scale.

MXFP4 has 32 values per group, and its scale is a power of two (e8m0). gpt-oss stores experts as `*_blocks` uint8
[experts, out, in / 32, 16] and `*_scales` uint8 [experts, out, in / 32].
Source: OCP Microscaling Formats (MX) 1.0, sections 5.3 and 6.3; openai/gpt-oss, `Checkpoint._get_mxfp4_tensor`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.quantized.scheme import Parts, Scheme
from pagemill.kernels.types.grouped_weight import GroupedWeight

MXFP4_GROUP = 32
# Twice the values of e2m1, which are integers.
_DOUBLED = torch.tensor([0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12], dtype=torch.int8)
# Half of e8m0's values, so that the products equal the represented values. The smallest is subnormal in fp32.
_HALVED_SCALES = torch.tensor([2.0 ** (exponent - 127 - 1) for exponent in range(255)])
_NO_SCALE = 255


class Mxfp4(Scheme):
    """The layout of gpt-oss."""

    method, main, parts = "mxfp4", "blocks", ("blocks", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        pass

    def describe(self) -> str:
        return "mxfp4, groups of 32"

    def split_name(self, name: str) -> tuple[str, str]:
        for part in self.parts:
            if name.endswith(f"_{part}"):
                return name.removesuffix(f"_{part}"), part
        return super().split_name(name)

    def weight_name(self, module: str) -> str:
        return module

    def weights(self, parts: Parts) -> dict[str, QuantizedWeight]:
        """Return experts, stacked as blocks [experts, out, groups, 16], one by one: `NAME.0` and so on."""
        if parts.tensors["blocks"].ndim != 4:
            return super().weights(parts)
        blocks = parts.take("blocks", (torch.uint8,), (None, None, None, MXFP4_GROUP // 2))
        scales = parts.take("scales", (torch.uint8,), tuple(blocks.shape[:3]))
        return {
            f"{self.weight_name(parts.module)}.{expert}": mxfp4_weight(parts, each.flatten(1), scales[expert])
            for expert, each in enumerate(blocks)
        }

    def weight(self, parts: Parts) -> QuantizedWeight:
        blocks = parts.take("blocks", (torch.uint8,), (None, None, MXFP4_GROUP // 2))
        out_features, num_groups = blocks.shape[:2]
        scales = parts.take("scales", (torch.uint8,), (out_features, num_groups))
        return mxfp4_weight(parts, blocks.flatten(1), scales)


def doubled_float4(packed: torch.Tensor) -> torch.Tensor:
    """Return twice the values of e2m1 pairs uint8 [rows, bytes], int8 [rows, 2 * bytes]."""
    pairs = torch.stack([packed & 15, packed >> 4], dim=-1).view(len(packed), -1)
    return _DOUBLED[pairs.int()]


def halved_scales(exponents: torch.Tensor) -> torch.Tensor:
    """Return half of e8m0 scales uint8 in fp32."""
    return _HALVED_SCALES[exponents.int()]


def mxfp4_weight(parts: Parts, packed: torch.Tensor, exponents: torch.Tensor) -> QuantizedWeight:
    """Return the weight of pairs uint8 [out, in / 2] and e8m0 scales uint8 [out, in / 32]."""
    if bool((exponents == _NO_SCALE).any()):
        raise ModelLoadError(f"{parts.module} has scales that are not finite: the file is damaged")

    def read() -> GroupedWeight:
        return GroupedWeight(doubled_float4(packed), halved_scales(exponents))

    return parts.weight(len(packed), 2 * packed.shape[1], read)
