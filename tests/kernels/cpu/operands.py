"""Operands of the matmuls whose kernels round them."""

from __future__ import annotations

from types import ModuleType

import torch

from pagemill.kernels.cpu.matmul import int8
from pagemill.kernels.cpu.matmul.converted import PackedPanels
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL


def make(
    kernel: ModuleType, in_features: int, out_features: int
) -> tuple[torch.Tensor, PackedPanels, torch.Tensor]:
    """Return (weight, packed, bias), with NaN in the bias of padded channels."""
    sizes = torch.rand(out_features, 1) if kernel is int8 else in_features**-0.5
    weight = torch.randn(out_features, in_features) * sizes
    packed = kernel.pack(weight)
    bias = torch.full((len(packed.panels) * PANEL,), torch.nan)
    bias[:out_features] = torch.randn(out_features)
    return weight, packed, bias


def activations(num_rows: int, in_features: int) -> torch.Tensor:
    """Rows of different sizes, with outliers and zeros, and a non-contiguous stride."""
    x = torch.randn(num_rows, in_features + 3)[:, 1:-2] * torch.rand(num_rows, 1) * 10
    x[torch.rand(x.shape) < 0.01] *= 100
    x[torch.rand(x.shape) < 0.1] = 0.0
    return x
