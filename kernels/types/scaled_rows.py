"""Rows of 8-bit numbers with a scale each: quantized activations, and weights with a scale per output."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class ScaledRows:
    """x[r, c] ~ numbers[r, c] * scales[r]; `pagemill.kernels.row_scaled` defines the rounding."""

    numbers: torch.Tensor
    """[num_rows, size] int8 or float8_e4m3fn, contiguous"""
    scales: torch.Tensor
    """fp32 [num_rows]; NaN of a row with anything that is not finite"""
    dtype: torch.dtype
    """Of x, and of the products of these rows."""
    kept: torch.Tensor | None = None
    """x itself, where something reads it in addition to the product."""

    @property
    def shape(self) -> torch.Size:
        return self.numbers.shape

    def __len__(self) -> int:
        return len(self.numbers)
