"""8-bit integers with a scale per row and group of columns: the definition, and the matmul in plain torch.

Rows are rounded to such integers. Weights are rounded too, unless they are already integers of at most 8 bits
with scales. Those stay unchanged, with an offset for each group that had one (`kernels.cpu.matmul.grids`
finds them).

Small groups limit the effect of an outlier. One scale for a complete row of activations raises a model's
perplexity by several percent, groups of 32 by less than half a percent (docs/quantization.md).
"""

from __future__ import annotations

import math

import torch

from pagemill.kernels.types.layer_cache import SMALLEST_PEAK

GROUP = 32  # columns that share a scale
LIMIT = 127.0


def num_groups(size: int) -> int:
    return -(-size // GROUP)


def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return int8 numbers [num_rows, num_groups, GROUP] and fp32 scales [num_rows, num_groups], to nearest.

    x [num_rows, size] ~ numbers * scales; numbers past `size` in the last group are 0. The scale of a group
    with a non-finite value is NaN.
    """
    num_rows, size = x.shape
    groups = torch.nn.functional.pad(x.float(), (0, -size % GROUP)).view(num_rows, num_groups(size), GROUP)
    peaks = groups.abs().amax(dim=2)
    is_finite = peaks.isfinite()
    peaks = peaks.clamp(min=SMALLEST_PEAK)
    limits = torch.full_like(peaks, LIMIT)  # a tensor: torch multiplies by a Python number's reciprocal
    factors = limits / peaks
    numbers = (groups * factors[..., None]).round().where(is_finite[..., None], 0.0).to(torch.int8)
    return numbers, (peaks / limits).where(is_finite, math.nan)


def multiply(
    x: torch.Tensor,
    weight_numbers: torch.Tensor,
    weight_scales: torch.Tensor,
    bias: torch.Tensor | None,
    weight_offsets: torch.Tensor | None = None,
) -> torch.Tensor:
    """x [num_rows, in_features] quantized, times a weight of integers, plus bias; [num_rows, out_features] fp32.

    Sums within a group are integers, hence exact. The groups are added in order, each with one rounding.

    Args:
        weight_offsets: added to weights, fp32 [out_features, num_groups]. Times the sum of the row's group, they are
            added before the group's products, with two roundings.
    """
    numbers, scales = quantize(x)
    out = torch.zeros(len(x), len(weight_numbers), device=x.device)
    out = out if bias is None else out + bias.float()
    for group in range(numbers.shape[1]):
        # Below 2 ** 24, every sum of integers is exact in fp32, in any order.
        row_numbers, row_scales = numbers[:, group].float(), scales[:, group, None]
        if weight_offsets is not None:
            out = _multiply_add(
                row_numbers.sum(dim=1, keepdim=True) * row_scales, weight_offsets[:, group], out
            )
        sums = row_numbers @ weight_numbers[:, group].float().t()
        out = _multiply_add(sums, row_scales * weight_scales[:, group], out)
    return out


def _multiply_add(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    """a * b + c of fp32 values with one rounding.

    The product is exact in fp64. The sum is rounded to odd in fp64. The second rounding, to fp32, then equals
    a single rounding (Boldo and Melquiond 2008, "Emulation of a FMA and correctly rounded sums").
    """
    product, term = a.double() * b.double(), c.double()
    total = product + term
    rest = total - product
    error = (product - (total - rest)) + (term - rest)
    is_even = total.view(torch.int64) & 1 == 0
    other = torch.nextafter(total, error.sign() * math.inf)
    return torch.where((error != 0) & is_even, other, total).float()
