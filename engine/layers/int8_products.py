"""Matmuls of 8-bit integers: separate scales for weights and activations, exact sums.

With one activation scale for the complete batch, as in torch's dynamic quantization, an outlier in one
request would change another request's result. On CPU a scale covers a group of inputs
(`pagemill.kernels.grouped_int8`); on CUDA a complete row (`pagemill.kernels.row_scaled`), which reduces
accuracy (docs/quantization.md).
"""

from __future__ import annotations

import torch
from torch import nn

from pagemill.kernels import grouped_int8


def quantization_scheme(quantization: str | None, scale_span: str) -> str | None:
    """Return the settings that determine the results of an engine with this option, for a checkpoint's
    fingerprint.

    Args:
        scale_span: `DeviceBackend.int8_scale_span`.
    """
    if quantization is None:
        return None
    span = scale_span if quantization == "int8" else "row"
    return f"{quantization} weights and activations, a scale per {span}"


class PlainInt8Product(nn.Module):
    """The same results computed by torch, slowly, for installations without the kernels' compiler."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._numbers, self._scales = grouped_int8.quantize(weight)
        self._bias = None if bias is None else bias.float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return grouped_int8.multiply(rows, self._numbers, self._scales, self._bias)
