"""Products of 8-bit integers: separate scales for weights and activations, exact sums.

With one activation scale for the whole batch, as in torch's dynamic quantisation, a neighbour's outlier would
change a request's result. On CPU a scale covers a group of inputs (`pagemill.kernels.grouped_int8`); on CUDA,
where the library's product has no groups, a whole row, which costs accuracy (docs/quantization.md).
"""

from __future__ import annotations

import torch
from torch import nn

from pagemill.kernels import grouped_int8
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK

LIMIT = 127.0
# torch._int_mm on CUDA needs more than 16 rows on the left, and inputs and outputs in multiples of 8.
_FEWEST_CUDA_ROWS = 32
_CUDA_MULTIPLE = 8


def quantization_scheme(quantization: str | None, scale_span: str) -> str | None:
    """Return all that determines the numbers an engine with this option computes, for a checkpoint's
    fingerprint.

    Args:
        scale_span: `DeviceBackend.int8_scale_span`.
    """
    if quantization != "int8":
        return quantization
    return f"int8 weights and activations, a scale per {scale_span}"


class PlainInt8Product(nn.Module):
    """The same numbers by torch alone, slowly: for installations without the kernels' compiler."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._numbers, self._scales = grouped_int8.quantise(weight)
        self._bias = None if bias is None else bias.float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return grouped_int8.multiply(rows, self._numbers, self._scales, self._bias)


class CudaInt8Product(nn.Module):
    """The product by cuBLAS; unsupported sizes (50,257 tokens, a single row) are zero-padded and cut."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self._out_features, in_features = weight.shape
        numbers, self._scales = quantise_rows(weight)
        self._missing_inputs = -in_features % _CUDA_MULTIPLE
        missing_outputs = -self._out_features % _CUDA_MULTIPLE
        self._numbers = nn.functional.pad(numbers, (0, self._missing_inputs, 0, missing_outputs)).t()
        self._bias = None if bias is None else bias.float()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        numbers, scales = quantise_rows(rows)
        num_rows = len(numbers)
        missing_rows = max(0, _FEWEST_CUDA_ROWS - num_rows)
        if missing_rows or self._missing_inputs:
            numbers = nn.functional.pad(numbers, (0, self._missing_inputs, 0, missing_rows))
        sums = torch._int_mm(numbers, self._numbers)[:num_rows, : self._out_features]
        out = sums * self._scales * scales[:, None]
        return out if self._bias is None else out.add_(self._bias)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise a matrix to int8 numbers and fp32 scales [num_rows]: x ~ numbers * scales[:, None], to nearest."""
    x = x.float()
    scales = x.abs().amax(dim=1).clamp(min=SMALLEST_PEAK) / LIMIT
    return (x / scales[:, None]).round().to(torch.int8), scales
