"""Compares a checkpoint's tensors with its config.json before a model of that size is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def check_sizes(config: Any, tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise `ModelLoadError` for a configuration far larger than the checkpoint.

    Building such a model would take the memory, or the hours, that the wrong config.json implies.
    """
    stored = sum(tensor.numel() for tensor in tensors.values())
    if config.num_hidden_layers > len(tensors):
        raise ModelLoadError(
            f"config.json asks for {config.num_hidden_layers} layers, of {len(tensors)} tensors"
        )
    for name in ("hidden_size", "vocab_size", "intermediate_size", "ffn_dim", "n_inner"):
        size = getattr(config, name, None)
        if isinstance(size, int) and size > stored:
            raise ModelLoadError(f"config.json asks for a {name} of {size}, of {stored} numbers in all")


def check_packing(tensors: Iterable[str]) -> None:
    """Raise `ModelLoadError` for gpt-oss's packed experts in a checkpoint that does not declare them."""
    if (name := next((name for name in tensors if name.endswith("_proj_blocks")), None)) is not None:
        raise ModelLoadError(
            f"{name} is in MXFP4, and config.json names no quantization_config for it; take config.json from where "
            "the weights are from"
        )


def check_dtypes(tensors: Mapping[str, torch.Tensor], used: Iterable[str]) -> None:
    """Raise `ModelLoadError` for weights that are not plain floats: casting them would not give a model."""
    for name in sorted(used):
        tensor = tensors.get(name)
        if tensor is not None and tensor.dtype not in _FLOATS:
            dtype = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(
                f"{name} has dtype {dtype}, and config.json names no quantization_config for it"
            )
