"""Quantize rows with one scale each, alone or with the preceding gated activation.

A row is read twice, first for its largest value; the second read hits the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.rounding import row_scale, size_bits, to_8_bits
from pagemill.kernels.gpu.tuning import LAUNCHES, next_power_of_2, row_warps
from pagemill.kernels.types.layer_cache import as_bytes, largest_number
from pagemill.kernels.types.scaled_rows import ScaledRows

_LAUNCH = LAUNCHES["quantize_rows"]


@triton.jit
def _numbers(x_ptr, columns, size, GATED: tl.constexpr):
    """Load some values of a row, or silu(gate) * up rounded to the row's dtype like `silu_and_mul`."""
    is_column = columns < size
    x = tl.load(x_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    if GATED:
        up = tl.load(x_ptr + size + columns, mask=is_column, other=0.0).to(tl.float32)
        x = x * tl.sigmoid(tl.maximum(x, -87.0)) * up
    return x.to(x_ptr.dtype.element_ty)


@triton.jit
def quantize_rows_kernel(
    numbers_ptr,  # [num_rows, size] int8 or bytes of e4m3
    scales_ptr,  # fp32 [num_rows]
    kept_ptr,  # [num_rows, size], or None
    x_ptr,  # [num_rows, size], or [num_rows, 2 * size] if GATED, the gate first
    size,
    stride_x_row,
    GATED: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, BLOCK)
    x_ptr += row * stride_x_row
    peaks = tl.zeros([BLOCK], tl.int32)
    for start in range(0, size, BLOCK):
        x = _numbers(x_ptr, start + lanes, size, GATED)
        peaks = tl.maximum(peaks, size_bits(x.to(tl.float32)))
    scale, factor = row_scale(tl.max(peaks, 0), LIMIT)
    tl.store(scales_ptr + row, scale)
    for start in range(0, size, BLOCK):
        columns = start + lanes
        x = _numbers(x_ptr, columns, size, GATED)
        if kept_ptr is not None:
            tl.store(kept_ptr + row * size + columns, x, mask=columns < size)
        numbers = to_8_bits(x.to(tl.float32), factor, INTEGER)
        tl.store(numbers_ptr + row * size + columns, numbers, mask=columns < size)


def quantize_rows(x: torch.Tensor, numbers: torch.dtype) -> ScaledRows:
    """See `pagemill.kernels.dispatch.quantize_rows`."""
    return _launch(x, x.shape[1], numbers, keeps=False)


def silu_and_quantize(gate_up: torch.Tensor, numbers: torch.dtype, keeps: bool) -> ScaledRows:
    """See `pagemill.kernels.dispatch.silu_and_quantize`."""
    return _launch(gate_up, gate_up.shape[1] // 2, numbers, keeps=keeps)


def _launch(x: torch.Tensor, size: int, numbers: torch.dtype, *, keeps: bool) -> ScaledRows:
    limit = largest_number(numbers)
    assert limit is not None, f"{numbers} has no scales"
    rows = ScaledRows(
        x.new_empty(len(x), size, dtype=numbers),
        x.new_empty(len(x), dtype=torch.float32),
        x.dtype,
        x.new_empty(len(x), size) if keeps else None,
    )
    if len(x):
        block = min(next_power_of_2(size), _LAUNCH.block)
        quantize_rows_kernel[(len(x),)](
            as_bytes(rows.numbers),
            rows.scales,
            rows.kept,
            x,
            size,
            x.stride(0),
            GATED=size != x.shape[1],
            LIMIT=limit,
            INTEGER=numbers is torch.int8,
            BLOCK=block,
            num_warps=row_warps(block),
            enable_fp_fusion=False,  # `row_scaled` rounds each product
        )
    return rows
