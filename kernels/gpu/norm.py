"""RMS norm over rows, alone or with the addition that precedes it, in one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import next_power_of_2, row_warps


@triton.jit
def rms_norm_kernel(
    out_ptr,  # [num_rows, SIZE]
    total_ptr,  # [num_rows, SIZE], or None
    x_ptr,  # [num_rows, SIZE]
    residual_ptr,  # [num_rows, SIZE], or None
    weight_ptr,  # [SIZE]
    stride_x_row,
    stride_residual_row,
    eps,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, SIZE_PADDED)
    is_column = columns < SIZE
    x = tl.load(x_ptr + row * stride_x_row + columns, mask=is_column, other=0.0).to(tl.float32)
    if residual_ptr is not None:
        residual = tl.load(residual_ptr + row * stride_residual_row + columns, mask=is_column, other=0.0)
        total = (x + residual.to(tl.float32)).to(total_ptr.dtype.element_ty)
        tl.store(total_ptr + row * SIZE + columns, total, mask=is_column)
        # The norm is that of the sum as the next layer will read it.
        x = total.to(tl.float32)
    factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / SIZE + eps)
    weight = tl.load(weight_ptr + columns, mask=is_column, other=0.0).to(tl.float32)
    tl.store(
        out_ptr + row * SIZE + columns, (x * factor * weight).to(out_ptr.dtype.element_ty), mask=is_column
    )


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.rms_norm`."""
    out = x.new_empty(x.shape)
    _launch(out, None, x, None, weight, eps)
    return out


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `pagemill.kernels.dispatch.add_rms_norm`."""
    out, total = x.new_empty(x.shape), x.new_empty(x.shape)
    _launch(out, total, x, residual, weight, eps)
    return out, total


def _launch(
    out: torch.Tensor,
    total: torch.Tensor | None,
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
) -> None:
    num_rows, size = x.shape
    if num_rows == 0:
        return
    rms_norm_kernel[(num_rows,)](
        out,
        total,
        x,
        residual,
        weight,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        eps,
        SIZE=size,
        SIZE_PADDED=next_power_of_2(size),
        num_warps=row_warps(size),
    )
