"""8-bit numbers with a scale per row: the definition, and the operators on them in plain torch.

int8 or fp8 (e4m3) activations, each row with its own scale, times weights with a scale per output: what a GPU's
libraries multiply. The rounding is exact on every face: a row's largest size p gives the factor L / p and the scale
p / L, L being the largest number of the dtype, each rounded once to fp32; a number is x times the factor, rounded to
fp32 and then to the dtype, to nearest, ties to even.
"""

from __future__ import annotations

import math

import torch

from pagemill.kernels import reference
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK, largest_number
from pagemill.kernels.types.scaled_rows import ScaledRows


def quantise_rows(x: torch.Tensor, numbers: torch.dtype) -> ScaledRows:
    """x [num_rows, size] in int8 or e4m3, each row with a scale; `pagemill.kernels.row_scaled` defines every bit.

    The last dimension of x is contiguous.
    """
    limit = largest_number(numbers)
    assert limit is not None, f"{numbers} has no scales"
    wide = x.float()
    peaks = wide.abs().amax(dim=1)
    is_finite = peaks.isfinite()
    peaks = peaks.clamp(min=SMALLEST_PEAK)
    limits = torch.full_like(peaks, limit)  # a tensor: torch multiplies with a number's reciprocal
    scaled = (wide * (limits / peaks)[:, None]).where(is_finite[:, None], 0.0)
    rounded = (scaled.round() if numbers is torch.int8 else scaled).to(numbers)
    return ScaledRows(rounded, (peaks / limits).where(is_finite, math.nan), x.dtype)


def norm_and_quantise(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    numbers: torch.dtype,
    keeps: bool,
) -> tuple[ScaledRows, torch.Tensor]:
    """`rms_norm`, or `add_rms_norm` with a residual, and its rows quantized; also the sum, or x without a residual.

    Args:
        keeps: `ScaledRows.kept` has the norm.
    """
    if residual is None:
        return _scaled(reference.rms_norm(x, weight, eps), numbers, keeps), x
    normed, total = reference.add_rms_norm(x, residual, weight, eps)
    return _scaled(normed, numbers, keeps), total


def silu_and_quantise(gate_up: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    """`silu_and_mul` and its rows quantized. `keeps`: `ScaledRows.kept` has the result of `silu_and_mul`."""
    return _scaled(reference.silu_and_mul(gate_up), numbers, keeps)


def _scaled(x: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    rows = quantise_rows(x, numbers)
    return ScaledRows(rows.numbers, rows.scales, rows.dtype, x if keeps else None)


def scaled_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """(rows W^T * the weight's scales * the rows' scales) + bias, [num_rows, out_features] of the rows' dtype.

    Sums of int8 numbers are exact, those of e4m3 numbers fp32 in any order; each scale is then multiplied with one
    rounding in fp32.

    Args:
        weight: [out_features, in_features], of the rows' kind of numbers.
        bias: [out_features], of any dtype.
    """
    # Sums are exact: of integers, and in fp64 all but so of floats.
    sums = (rows.numbers.double() @ weight.numbers.double().t()).float()
    out = sums * weight.scales * rows.scales[:, None]
    return (out if bias is None else out + bias.float()).to(rows.dtype)
