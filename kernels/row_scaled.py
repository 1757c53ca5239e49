"""8-bit values with a scale per row: the definition, and the operators on them in plain torch.

int8 or fp8 (e4m3) activations with one scale per row, times weights with one scale per output, as in GPU
libraries. The rounding is identical in all implementations. A row's largest magnitude p determines the factor
L / p and the scale p / L, where L is the largest value of the dtype; each is rounded once to fp32. A
quantized value is x times the factor, rounded to fp32 and then to the dtype, to nearest, ties to even.
"""

from __future__ import annotations

import math

import torch

from pagemill.kernels import reference
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK, largest_number
from pagemill.kernels.types.scaled_rows import ScaledRows


def quantize_rows(x: torch.Tensor, numbers: torch.dtype) -> ScaledRows:
    """Quantize x [num_rows, size] to int8 or e4m3, one scale per row; `pagemill.kernels.row_scaled` defines every bit.

    The last dimension of x is contiguous.
    """
    limit = largest_number(numbers)
    assert limit is not None, f"{numbers} has no scales"
    wide = x.float()
    peaks = wide.abs().amax(dim=1)
    is_finite = peaks.isfinite()
    peaks = peaks.clamp(min=SMALLEST_PEAK)
    limits = torch.full_like(peaks, limit)  # a tensor: torch multiplies by a Python number's reciprocal
    scaled = (wide * (limits / peaks)[:, None]).where(is_finite[:, None], 0.0)
    rounded = (scaled.round() if numbers is torch.int8 else scaled).to(numbers)
    return ScaledRows(rounded, (peaks / limits).where(is_finite, math.nan), x.dtype)


def norm_and_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    numbers: torch.dtype,
    keeps: bool,
) -> tuple[ScaledRows, torch.Tensor]:
    """`rms_norm`, or `add_rms_norm` with a residual, with quantized rows; also the sum, or x without a residual.

    Args:
        keeps: store the norm in `ScaledRows.kept`.
    """
    if residual is None:
        return _scaled(reference.rms_norm(x, weight, eps), numbers, keeps), x
    normed, total = reference.add_rms_norm(x, residual, weight, eps)
    return _scaled(normed, numbers, keeps), total


def silu_and_quantize(gate_up: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    """`silu_and_mul` with quantized rows. `keeps`: store the unquantized result in `ScaledRows.kept`."""
    return _scaled(reference.silu_and_mul(gate_up), numbers, keeps)


def _scaled(x: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    rows = quantize_rows(x, numbers)
    return ScaledRows(rows.numbers, rows.scales, rows.dtype, x if keeps else None)


def scaled_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """(rows W^T * the weight's scales * the rows' scales) + bias, [num_rows, out_features] in the rows' dtype.

    Sums of int8 values are exact. Sums of e4m3 values are fp32 in any order. Each scale is then multiplied in
    fp32 with one rounding.

    Args:
        weight: [out_features, in_features], quantized like the rows.
        bias: [out_features], of any dtype.
    """
    # Sums are exact for integers, and in fp64 nearly exact for floats.
    sums = (rows.numbers.double() @ weight.numbers.double().t()).float()
    out = sums * weight.scales * rows.scales[:, None]
    return (out if bias is None else out + bias.float()).to(rows.dtype)
