"""Linear layers of 8-bit integers: weights with a scale per output channel, activations with a scale per token.

One activation scale for the whole batch, as torch's own dynamic quantisation has, would let a neighbour's outlier
change what a request gets. Products of integers are exact, so a row's result depends on that row alone.
"""

from __future__ import annotations

import torch
from torch import nn

LIMIT = 127.0
_SMALLEST_PEAK = 1e-30  # a row of zeros needs a scale too
# cuBLAS multiplies int8 only from this many rows on.
_FEWEST_CUDA_ROWS = 32


class Int8Linear(nn.Module):
    """y = x W^T + b by an integer product; takes [..., in_features] and returns x's dtype."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        numbers, self._scales = quantise_rows(weight.detach())
        self._bias = None if bias is None else bias.detach().float().contiguous()
        self._is_cuda = weight.is_cuda
        if self._is_cuda:
            self._numbers = numbers.t()
        else:
            self._numbers = torch.ops.onednn.qlinear_prepack(numbers.contiguous(), None)
            self._zero_points = torch.zeros(self.out_features, dtype=torch.int32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        out = self._on_cuda(rows) if self._is_cuda else self._on_cpu(rows)
        return out.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def _on_cpu(self, rows: torch.Tensor) -> torch.Tensor:
        from kernels import cpu_quantize

        numbers, scales = cpu_quantize.quantise_rows(rows.float())
        # The product's own activation scale is one for the batch: 1 here, and every row is scaled afterwards.
        out: torch.Tensor = torch.ops.onednn.qlinear_pointwise(
            numbers, 1.0, cpu_quantize.ZERO_POINT, self._numbers, self._scales, self._zero_points, None,
            1.0, 0, torch.float32, "none", [], "",
        )  # fmt: skip
        out *= scales[:, None]
        return out if self._bias is None else out.add_(self._bias)

    def _on_cuda(self, rows: torch.Tensor) -> torch.Tensor:
        numbers, scales = quantise_rows(rows)
        num_rows = len(numbers)
        if num_rows < _FEWEST_CUDA_ROWS:
            numbers = torch.nn.functional.pad(numbers, (0, 0, 0, _FEWEST_CUDA_ROWS - num_rows))
        out = torch._int_mm(numbers, self._numbers)[:num_rows] * self._scales * scales[:, None]
        return out if self._bias is None else out.add_(self._bias)


def quantise_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 numbers and fp32 scales [num_rows] of a matrix, to nearest: x ~ numbers * scales[:, None]."""
    x = x.float()
    scales = x.abs().amax(dim=1).clamp(min=_SMALLEST_PEAK) / LIMIT
    return (x / scales[:, None]).round().to(torch.int8), scales
