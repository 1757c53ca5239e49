"""AWQ in AutoAWQ's format: 4-bit integers with zero points, in the layout of its GEMM kernel.

`qweight` int32 [in, out / 8], `qzeros` int32 [groups, out / 8], `scales` fp16 [groups, out]; a word holds eight
outputs, the even ones below the odd ones. W = (q - z) * s.
Source: AutoAWQ, `WQLinear_GEMM` and `reverse_awq_order`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.quantized.scheme import (
    Parts,
    Scheme,
    choice,
    even_groups,
    group_size_of,
    setting,
)
from pagemill.engine.models.quantized.words import unpacked
from pagemill.kernels.types.grouped_weight import GroupedWeight

_WORD = 8
# The position of each output in its word.
_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)


class Awq(Scheme):
    method, main, parts = "awq", "qweight", ("qweight", "qzeros", "scales")

    def __init__(self, config: Mapping[str, Any]) -> None:
        choice({"bits": config.get("bits", config.get("w_bit"))}, "bits", (4,))
        version = str(config.get("version") or "gemm").lower()
        choice({"version": version}, "version", ("gemm",))
        self._group_size = group_size_of({"group_size": config.get("group_size", config.get("q_group_size"))})
        self._has_zeros: bool = setting(config, "zero_point", bool, default=True)

    def describe(self) -> str:
        kind = "with zero points" if self._has_zeros else "symmetric"
        return f"awq, 4 bits, groups of {self._group_size}, {kind}"

    def weight(self, parts: Parts) -> QuantizedWeight:
        qweight = parts.take("qweight", (torch.int32,), (None, None))
        in_features, out_features = qweight.shape[0], qweight.shape[1] * _WORD
        size = in_features if self._group_size == -1 else self._group_size
        num_groups = -(-in_features // size)
        scales = parts.scales("scales", (num_groups, out_features))
        qzeros = None
        if self._has_zeros or "qzeros" in parts:
            qzeros = parts.take("qzeros", (torch.int32,), (num_groups, out_features // _WORD))

        def read() -> GroupedWeight:
            middle = torch.full_like(scales, 8, dtype=torch.int16)
            zeros = (middle if qzeros is None else _outputs(qzeros).short()).t()
            return GroupedWeight(
                _outputs(qweight).t().contiguous(),
                even_groups(scales.t().float(), in_features, size).contiguous(),
                even_groups(zeros, in_features, size).contiguous(),
                bits=4,
            )

        return parts.weight(out_features, in_features, read)


def _outputs(words: torch.Tensor) -> torch.Tensor:
    codes = unpacked(words, 4).view(len(words), -1, _WORD)
    return codes[:, :, list(_PLACES)].view(len(words), -1)
