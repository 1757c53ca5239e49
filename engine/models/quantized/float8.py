"""FP8 (e4m3) weights with a scale per tensor, output or block, in the formats of DeepSeek, Qwen3 and FBGEMM.

`weight` float8_e4m3fn [out, in] and `weight_scale_inv` fp32 [out / 128, in / 128], or `weight_scale` of one value or
[out, 1]. Despite its name, the first one is also a factor: W = weight * scale.
Source: DeepSeek-V3, `weight_dequant`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.quantized.scheme import Parts, Scheme, choice, even_groups
from pagemill.kernels.types.grouped_weight import GroupedWeight

FLOAT8 = torch.float8_e4m3fn
_SCALES = ("weight_scale_inv", "weight_scale")
_NAN = 0x7F


class Float8(Scheme):
    method, main = "fp8", "weight"
    parts = ("weight", *_SCALES, "input_scale", "activation_scale", "input_scale_ub")

    def __init__(self, config: Mapping[str, Any]) -> None:
        choice(config, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
        self._block = _block_of(config.get("weight_block_size"))

    def describe(self) -> str:
        extent = "per tensor or output" if self._block is None else f"per block of {self._block}"
        return f"{self.method}, e4m3 with scales {extent}"

    def is_quantized(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return any(name in tensors for name in _SCALES) or (
            "weight" in tensors and tensors["weight"].dtype is FLOAT8
        )

    def weight(self, parts: Parts) -> QuantizedWeight:
        scale_name = next((name for name in _SCALES if name in parts), _SCALES[0 if self._block else 1])
        return float8_weight(parts, scale_name, self._block)


def _block_of(value: Any) -> tuple[int, int] | None:
    if value is None:
        return None
    if not (isinstance(value, list) and len(value) == 2 and all(type(n) is int and n > 0 for n in value)):
        raise ModelLoadError(f"can't read quantization_config: weight_block_size is {value!r}")
    return value[0], value[1]


def float8_weight(parts: Parts, scale_name: str, block: tuple[int, int] | None) -> QuantizedWeight:
    """Return an e4m3 weight with one scale, a scale per output, or one per `block` of outputs and inputs."""
    codes = parts.take("weight", (FLOAT8,), (None, None))
    out_features, in_features = codes.shape
    shapes: tuple[tuple[int, ...], ...] = ((), (1,), (1, 1), (out_features,), (out_features, 1))
    if block is not None:
        shapes = ((-(-out_features // block[0]), -(-in_features // block[1])),)
    scales = parts.scales(scale_name, *shapes)

    def read() -> GroupedWeight:
        if bool((codes.view(torch.uint8) & _NAN == _NAN).any()):
            raise ModelLoadError(f"{parts.module}.weight is not finite: the file is damaged")
        return GroupedWeight(codes, _per_output(scales, (out_features, in_features), block))

    return parts.weight(out_features, in_features, read)


def _per_output(scales: torch.Tensor, shape: tuple[int, int], block: tuple[int, int] | None) -> torch.Tensor:
    """Return scales as [out_features, num_groups]."""
    if block is None:
        return scales.float().reshape(-1, 1).expand(shape[0], 1).contiguous()
    rows = scales.float().repeat_interleave(block[0], dim=0)[: shape[0]]
    return even_groups(rows, shape[1], block[1]).contiguous()
