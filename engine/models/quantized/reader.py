"""Converts a quantized checkpoint's tensors to the module's weights."""

from __future__ import annotations

import logging
import re
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight
from pagemill.engine.models.quantized.scheme import Parts, Scheme

logger = logging.getLogger(__name__)

# Scales of a quantized KV cache: its format is an engine option, and its scales are computed at each write.
_CACHE_SCALES = re.compile(r"\.(k_scale|v_scale|q_scale|kv_scale|prob_scale|k_zero_point|v_zero_point)$")


def join_parts(tensors: Mapping[str, torch.Tensor], scheme: Scheme, dtype: torch.dtype) -> dict[str, Weight]:
    """Return a checkpoint's tensors by name, with each quantized group replaced by its weight.

    Args:
        dtype: the model's dtype.

    Raises:
        ModelLoadError: a part is missing or damaged, or does not match the configuration.
    """
    modules: dict[str, dict[str, torch.Tensor]] = defaultdict(dict)
    out: dict[str, Weight] = {}
    for name, tensor in tensors.items():
        module, part = scheme.split_name(name)
        if part in scheme.parts:
            modules[module][part] = tensor
        elif not _CACHE_SCALES.search(name):
            out[name] = tensor
    for module, found in modules.items():
        if scheme.is_quantized(found):
            out |= scheme.weights(Parts(module, found, dtype))
        elif found.keys() == {"weight"}:
            out[f"{module}.weight"] = found["weight"]
        else:
            raise ModelLoadError(f"{module} has {', '.join(sorted(found))}, and no {scheme.main}")
    return out


def check_quantized(tensors: Mapping[str, Weight], scheme: Scheme) -> None:
    """Raise `ModelLoadError` if no tensor of a checkpoint has its declared format, except GGUF."""
    if scheme.has_quantized_tensors and not any(isinstance(t, QuantizedWeight) for t in tensors.values()):
        raise ModelLoadError("quantization_config names a format, and no tensor is in it")


def widened(tensors: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    """Return all weights as tensors, for a family that rewrites them."""
    return {
        name: tensor.dense() if isinstance(tensor, QuantizedWeight) else tensor
        for name, tensor in tensors.items()
    }


def placeholders(tensors: Mapping[str, Weight]) -> dict[str, torch.Tensor]:
    """Return placeholder tensors without memory in place of quantized weights."""
    return {
        name: torch.zeros((), dtype=tensor.dtype).expand(tensor.shape)
        if isinstance(tensor, QuantizedWeight)
        else tensor
        for name, tensor in tensors.items()
    }


def place(module: Any, tensors: Mapping[str, Weight], *, is_split: bool) -> None:
    """Assign quantized weights to the module's linear layers, and dequantized ones to other modules.

    Args:
        is_split: several ranks share the model, and cut the head themselves.
    """
    head = module.get_output_embeddings() if is_split else None
    for name, weight in tensors.items():
        if not isinstance(weight, QuantizedWeight):
            continue
        owner = module.get_submodule(name.removesuffix(".weight"))
        if isinstance(owner, nn.Linear) and owner is not head:
            owner.register_parameter("weight", None)
            owner.stored = weight  # type: ignore[assignment]
        else:
            owner.weight = nn.Parameter(weight.dense(), requires_grad=False)
            module.tie_weights()
