"""Rows of 8-bit values with one scale each: quantized activations, and weights with a scale per output."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """x[r, c] ~ numbers[r, c] * scales[r]; `pagemill.kernels.row_scaled` defines the rounding."""

    numbers: torch.Tensor
    """[num_rows, size] int8 or float8_e4m3fn, contiguous"""
    scales: torch.Tensor
    """fp32 [num_rows]; NaN for a row with a non-finite value"""
    dtype: torch.dtype
    """The dtype of x, and of matmul results of these rows."""
    kept: torch.Tensor | None = None
    """x itself, if another operator also reads it."""

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __len__(self) -> int:
        return len(self.numbers)
