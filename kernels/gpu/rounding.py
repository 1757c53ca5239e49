"""Round fp32 values to 8 bits, for every kernel that stores such values."""

from __future__ import annotations

import triton
import triton.language as tl

from pagemill.kernels.types.layer_cache import SMALLEST_PEAK

_SMALLEST_PEAK = tl.constexpr(SMALLEST_PEAK)
_INFINITY_BITS = tl.constexpr(0x7F800000)
# Adding and subtracting it rounds an fp32 value of up to 22 bits to the nearest integer, ties to even.
_ROUNDER = tl.constexpr(1.5 * 2.0**23)


@triton.jit
def to_integers(numbers):
    """Round fp32 values of magnitude up to 127 to integers, still fp32, to nearest, ties to even."""
    return (numbers + _ROUNDER) - _ROUNDER


@triton.jit
def to_e4m3(numbers):
    """Convert fp32 values of magnitude up to 448 to e4m3 bytes, to nearest, ties to even.

    Uses integers, because the interpreter's cast rounds incorrectly.
    """
    size = tl.abs(numbers)
    bits = size.to(tl.int32, bitcast=True)
    # Drop 20 of 23 bits; the exponent's bias is 127 in fp32 and 7 here.
    normal = ((bits + ((bits >> 20) & 1) + 0x7FFFF) >> 20) - (120 << 3)
    # Below 2^-6, values are multiples of 2^-9.
    subnormal = to_integers(size * 512.0).to(tl.int32)
    code = tl.where(size < 0.015625, subnormal, normal)
    return (code | tl.where(numbers < 0, 0x80, 0)).to(tl.uint8)


@triton.jit
def size_bits(numbers):
    """The bits of fp32 magnitudes, in the same order as the magnitudes, with non-finite values above all others."""
    return tl.abs(numbers).to(tl.int32, bitcast=True)


@triton.jit
def row_scale(peak_bits, LIMIT: tl.constexpr):
    """Return (scale, factor) of a row from its largest `size_bits`, as `pagemill.kernels.row_scaled` defines them.

    NaN and 0 if the row is not finite.
    """
    is_finite = peak_bits < _INFINITY_BITS
    peak = tl.where(is_finite, peak_bits, 0).to(tl.float32, bitcast=True)
    peak = tl.maximum(peak, _SMALLEST_PEAK)
    scale = tl.where(is_finite, tl.div_rn(peak, LIMIT * 1.0), float("nan"))
    return scale, tl.where(is_finite, tl.div_rn(LIMIT * 1.0, peak), 0.0)


@triton.jit
def to_8_bits(numbers, factor, INTEGER: tl.constexpr):
    """Multiply fp32 values of a row by its factor and round to int8 or e4m3 bytes. Requires fp fusion to be off."""
    scaled = tl.where(factor > 0.0, numbers, 0.0) * factor
    if INTEGER:
        return to_integers(scaled).to(tl.int8)
    else:
        return to_e4m3(scaled)
