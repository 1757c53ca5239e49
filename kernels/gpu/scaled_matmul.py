"""Matmuls of 8-bit values with a scale per row and per output, applied to the sums: W8A8.

int8 uses Pagemill's kernel, because the library returns int32 sums, which would cross memory once more. fp8
uses the library (`torch._scaled_mm`) if it supports the sizes and dtype, otherwise the same kernel.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tile_order import TILE_GROUP, tile_of_program
from pagemill.kernels.gpu.tuning import SCALED_MATMUL_INPUTS, scaled_matmul_tile
from pagemill.kernels.types.layer_cache import FP8
from pagemill.kernels.types.scaled_rows import ScaledRows

# For the library's matmul: sizes in bytes of 8-bit values.
_LIBRARY_MULTIPLE = 16
# Sums of more products of two int8 values could overflow int32.
_MOST_INTEGER_INPUTS = (2**31 - 1) // 127**2


@triton.jit(do_not_specialize=["num_rows"])
def scaled_matmul_kernel(
    out_ptr,  # [num_rows, out_features]
    rows_ptr,  # [num_rows, in_features]
    row_scales_ptr,  # fp32 [num_rows]
    weight_ptr,  # [out_features, in_features]
    weight_scales_ptr,  # fp32 [out_features]
    bias_ptr,  # [out_features], or None
    num_rows,
    out_features,
    in_features,
    INTEGER: tl.constexpr,
    WHOLE: tl.constexpr,  # BLOCK_K divides in_features
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row_tiles, column_tiles = tl.cdiv(num_rows, BLOCK_M), tl.cdiv(out_features, BLOCK_N)
    row_tile, column_tile = tile_of_program(row_tiles, column_tiles, GROUP)
    rows = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < out_features
    inner = tl.arange(0, BLOCK_K)
    x_ptrs = rows_ptr + rows.to(tl.int64)[:, None] * in_features + inner[None, :]
    weight_ptrs = weight_ptr + columns.to(tl.int64)[None, :] * in_features + inner[:, None]
    if INTEGER:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
    else:
        total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, in_features, BLOCK_K):
        if WHOLE:
            x = tl.load(x_ptrs + start, mask=is_row[:, None], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_column[None, :], other=0.0)
        else:
            is_input = start + inner < in_features
            x = tl.load(x_ptrs + start, mask=is_row[:, None] & is_input[None, :], other=0.0)
            weight = tl.load(weight_ptrs + start, mask=is_column[None, :] & is_input[:, None], other=0.0)
        if INTEGER:
            total = tl.dot(x, weight, total, out_dtype=tl.int32)
        else:
            # By default sm_90 accumulates e4m3 products in 14 bits; here they are added to fp32 after each
            # tile.
            total = tl.dot(x, weight, total, max_num_imprecise_acc=BLOCK_K)
    row_scales = tl.load(row_scales_ptr + rows, mask=is_row, other=0.0)
    weight_scales = tl.load(weight_scales_ptr + columns, mask=is_column, other=0.0)
    out = total.to(tl.float32) * weight_scales[None, :] * row_scales[:, None]
    if bias_ptr is not None:
        out += tl.load(bias_ptr + columns, mask=is_column, other=0.0).to(tl.float32)[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_ptrs, out.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


def scaled_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.scaled_matmul`."""
    if rows.numbers.is_cuda and library_takes(rows, weight):
        return library_matmul(rows, weight, bias)
    return own_matmul(rows, weight, bias)


def own_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """Run Pagemill's matmul kernel."""
    (num_rows, in_features), out_features = rows.shape, len(weight)
    is_integer = rows.numbers.dtype is torch.int8
    assert not is_integer or in_features <= _MOST_INTEGER_INPUTS
    out = rows.scales.new_empty(num_rows, out_features, dtype=rows.dtype)
    if num_rows == 0:
        return out
    tile = scaled_matmul_tile(num_rows)
    programs = triton.cdiv(num_rows, tile.block_m) * triton.cdiv(out_features, tile.block_n)
    scaled_matmul_kernel[(programs,)](
        out,
        rows.numbers,
        rows.scales,
        weight.numbers,
        weight.scales,
        bias,
        num_rows,
        out_features,
        in_features,
        INTEGER=is_integer,
        WHOLE=in_features % SCALED_MATMUL_INPUTS == 0,
        GROUP=TILE_GROUP,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        BLOCK_K=SCALED_MATMUL_INPUTS,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
        enable_fp_fusion=False,  # each scale rounds once, as in the definition
    )
    return out


def library_takes(rows: ScaledRows, weight: ScaledRows) -> bool:
    """Return True if `torch._scaled_mm` supports these dtypes and sizes with a scale per row and per output."""
    return (
        rows.numbers.dtype is FP8
        and rows.dtype is torch.bfloat16
        and not any(size % _LIBRARY_MULTIPLE for size in weight.shape)
    )


def library_matmul(rows: ScaledRows, weight: ScaledRows, bias: torch.Tensor | None) -> torch.Tensor:
    """Run `torch._scaled_mm`. A bias is added to the rounded result."""
    out: torch.Tensor = torch._scaled_mm(
        rows.numbers,
        weight.numbers.t(),
        scale_a=rows.scales[:, None],
        scale_b=weight.scales[None, :],
        out_dtype=rows.dtype,
        # Sums stay in the tensor cores: up to 14% faster on an H200, and far more exact than the values
        # themselves.
        use_fast_accum=True,
    )
    return out if bias is None else out.add_(bias)
