"""GPTQ in the format of AutoGPTQ and GPTQModel: integers with a scale and zero point per input group.

`qweight` int32 [in * bits / 32, out], packed along the inputs; `qzeros` int32 [groups, out * bits / 32]; `scales` fp16
[groups, out]; `g_idx` int32 [in], each input's group (act-order, where these are not in sequence).
W = (q - z) * s. Version 1 stores z - 1, version 2 ("gptq_v2") z.
Source: AutoGPTQ, `QuantLinear.forward`; GPTQModel, `convert_gptq_v1_to_v2_format`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight
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

_STORED_BELOW = {"gptq": 1, "gptq_v2": 0}


class Gptq(Scheme):
    method, main, parts = "gptq", "qweight", ("qweight", "qzeros", "scales", "g_idx")

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._bits: int = choice(config, "bits", INTEGER_SIZES)
        self._group_size = group_size_of(config)
        self._is_symmetric: bool = setting(config, "sym", bool, default=True)
        self._format: str = choice(config, "checkpoint_format", (*_STORED_BELOW,), "gptq")
        choice(config, "is_marlin_format", (False,), default=False)
        overrides = setting(config, "dynamic", dict, {})
        if any(not str(pattern).startswith("-") for pattern in overrides):
            raise ModelLoadError(
                "quantization_config has settings per layer (dynamic), which is not supported; "
                "give the original checkpoint"
            )

    def describe(self) -> str:
        kind = "symmetric" if self._is_symmetric else "with zero points"
        return f"{self._format}, {self._bits} bits, groups of {self._group_size}, {kind}"

    def weight(self, parts: Parts) -> QuantizedWeight:
        in_word = 32 // self._bits
        qweight = parts.take("qweight", (torch.int32,), (None, None))
        in_features, out_features = qweight.shape[0] * in_word, qweight.shape[1]
        size = in_features if self._group_size == -1 else self._group_size
        num_groups = -(-in_features // size)
        scales = parts.scales("scales", (num_groups, out_features))
        order = parts.group_order("g_idx", in_features, size)
        words = parts.take("qzeros", (torch.int32,), (num_groups, -(-out_features // in_word)))
        zeros = unpacked(words, self._bits)[:, :out_features].short() + _STORED_BELOW[self._format]
        middle = 2 ** (self._bits - 1)
        if self._is_symmetric and bool((zeros != middle).any()):
            raise ModelLoadError(
                f"{parts.module}.qzeros has zero points other than {middle}, although sym is true: "
                f"checkpoint_format {self._format!r} of quantization_config may be wrong"
            )

        def read() -> GroupedWeight:
            codes = unpacked(qweight.t(), self._bits)
            return GroupedWeight(
                codes if order is None else codes[:, order],
                even_groups(scales.t().float(), in_features, size).contiguous(),
                even_groups(zeros.t(), in_features, size).contiguous(),
                order,
                bits=max(4, self._bits),
            )

        return parts.weight(out_features, in_features, read)
