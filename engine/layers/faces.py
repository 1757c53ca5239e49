"""Which kernels take a model's tensors."""

from __future__ import annotations

import importlib.util

import torch


def uses_cpu_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the JIT-compiled CPU operators take this model: they are made for fp32."""
    return device.type == "cpu" and dtype is torch.float32 and importlib.util.find_spec("numba") is not None
