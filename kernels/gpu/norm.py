"""RMS norm over rows, alone or with the preceding addition and the following rounding, in one pass."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.rounding import row_scale, size_bits, to_8_bits
from pagemill.kernels.gpu.tuning import next_power_of_2, row_warps
from pagemill.kernels.types.layer_cache import as_bytes, largest_number
from pagemill.kernels.types.scaled_rows import ScaledRows


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [num_rows, SIZE], or None
    numbers_ptr,  # [num_rows, SIZE] int8 or bytes of e4m3, or None
    scales_ptr,  # fp32 [num_rows]; unused without numbers_ptr
    total_ptr,  # [num_rows, SIZE], or None
    x_ptr,  # [num_rows, SIZE]
    residual_ptr,  # [num_rows, SIZE], or None
    weight_ptr,  # [SIZE]
    stride_x_row,
    stride_residual_row,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    LIMIT: tl.constexpr,  # the largest quantized value
    INTEGER: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    is_column = columns < SIZE
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=is_column, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual_row + columns, mask=is_column, other=0.0)
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + columns, total, mask=is_column)
        # Normalize the rounded sum, as the next layer reads it.
        x = total.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    normed = (x * factor * weight).to(x_ptr.dtype.element_ty)
    if out_ptr is not None:
        tl.store(out_ptr + row * SIZE + columns, normed, mask=is_column)
    if numbers_ptr is not None:
        wide = normed.to(tl.float32)
        scale, factor = row_scale(tl.max(size_bits(wide), 0), LIMIT)
        tl.store(scales_ptr + row, scale)
        tl.store(numbers_ptr + row * SIZE + columns, to_8_bits(wide, factor, INTEGER), mask=is_column)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.rms_norm`."""
    out = x.new_empty(x.shape)
    _launch(_Outputs(out), x, None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagemill.kernels.dispatch.add_rms_norm`."""
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(_Outputs(out, total), x, residual, weight, eps)
    return out, total


def norm_and_quantize(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    numbers: torch.dtype,
    keeps: bool,
) -> tuple[ScaledRows, torch.Tensor]:
    """See `pagemill.kernels.dispatch.norm_and_quantize`."""
    rows = ScaledRows(
        x.new_empty(x.shape, dtype=numbers),
        x.new_empty(len(x), dtype=torch.float32),
        x.dtype,
        x.new_empty(x.shape) if keeps else None,
    )
    total = None if residual is None else x.new_empty(x.shape)
    _launch(_Outputs(rows.kept, total, rows), x, residual, weight, eps)
    return rows, x if total is None else total


@dataclass(frozen=True, slots=True)
class _Outputs:
    """The outputs of a launch."""

    normed: torch.Tensor | None
    total: torch.Tensor | None = None
    rows: ScaledRows | None = None


def _launch(
    out: _Outputs, x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    rows = out.rows
    rms_norm_kernel[(num_rows,)](
        out.normed,
        None if rows is None else as_bytes(rows.numbers),
        None if rows is None else rows.scales,
        out.total,
        x,
        residual,
        weight,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        SIZE_PADDED=next_power_of_2(size),
        LIMIT=0.0 if rows is None else largest_number(rows.numbers.dtype),
        INTEGER=rows is not None and rows.numbers.dtype is torch.int8,
        num_warps=row_warps(size),
        enable_fp_fusion=rows is None,  # `row_scaled` rounds each product
    )
