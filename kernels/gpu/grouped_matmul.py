"""Matmuls with 4-bit or 8-bit weights and a scale per output and group of inputs: W4A16 and W8A16.

Weights are dequantized in registers before they reach the tensor cores, because decoding is limited by memory
bandwidth. 8-bit integers are exact in fp16 and bf16, so a group's products are summed unscaled in fp32 and
scaled once.

With many rows, the tensor cores would wait for that: fp16 and bf16 rows are multiplied by the library, and by a
dequantized copy of the weight that exists during the call. Its values are rounded to the dtype of the rows.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.tuning import LAUNCHES, MOST_UNWIDENED_ROWS, matmul_tile
from pagemill.kernels.types.tiled_weight import TiledWeight


@triton.jit
def _widened(codes, zeros, dtype: tl.constexpr, FLOAT: tl.constexpr):
    if FLOAT:
        # An e4m3 value's bits, shifted up by seven, are an fp16 of 1/256 the value.
        bits = codes.to(tl.uint16)
        numbers = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        numbers = codes.to(dtype)
        if zeros is not None:
            numbers -= zeros.to(dtype)
    return numbers


@triton.jit(do_not_specialize=["num_rows"])
def grouped_matmul_kernel(
    out_ptr,  # [num_rows, out_features]
    x_ptr,  # [num_rows, in_features]
    codes_ptr,  # [out_features, in_features], or half as many bytes; see `TiledWeight`
    scales_ptr,  # [out_features, num_groups]
    zeros_ptr,  # [out_features, num_groups], or None
    num_rows,
    out_features,
    in_features,
    stride_x_row,
    chunks_per_group,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    rows = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_row, is_column = rows < num_rows, columns < out_features
    STEP: tl.constexpr = CHUNK // 2 if PACKED else CHUNK
    inner = tl.arange(0, STEP)
    num_chunks = in_features // CHUNK
    groups = columns.to(tl.int64) * (num_chunks // chunks_per_group)
    x_ptrs = x_ptr + rows.to(tl.int64)[:, None] * stride_x_row + inner[None, :]
    code_ptrs = codes_ptr + columns.to(tl.int64)[None, :] * (num_chunks * STEP) + inner[:, None]
    dtype = x_ptr.dtype.element_ty
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for chunk in range(num_chunks):
        group = groups + chunk // chunks_per_group
        scales = tl.load(scales_ptr + group, mask=is_column, other=0.0)
        zeros = None
        if zeros_ptr is not None:
            zeros = tl.load(zeros_ptr + group, mask=is_column, other=0)[None, :]
        codes = tl.load(code_ptrs + chunk * STEP, mask=is_column[None, :], other=0)
        x = tl.load(x_ptrs + chunk * CHUNK, mask=is_row[:, None], other=0.0)
        if PACKED:
            high_x = tl.load(x_ptrs + chunk * CHUNK + STEP, mask=is_row[:, None], other=0.0)
            sums = tl.dot(x, _widened(codes & 15, zeros, dtype, FLOAT), input_precision="ieee")
            high = _widened(codes >> 4, zeros, dtype, FLOAT)
            sums = tl.dot(high_x, high, sums, input_precision="ieee")
        else:
            sums = tl.dot(x, _widened(codes, zeros, dtype, FLOAT), input_precision="ieee")
        total += sums * scales[None, :]
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * out_features + columns[None, :]
    tl.store(out_ptrs, total.to(out_ptr.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])


@triton.jit
def widen_kernel(
    out_ptr,  # [out_features, in_features]
    codes_ptr,  # [out_features, in_features], or half as many bytes; see `TiledWeight`
    scales_ptr,  # [out_features, num_groups]
    zeros_ptr,  # [out_features, num_groups], or None
    num_chunks,  # of all outputs
    chunks_per_group,
    PACKED: tl.constexpr,
    FLOAT: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    chunks = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_chunk = chunks < num_chunks
    groups = chunks // chunks_per_group
    STEP: tl.constexpr = CHUNK // 2 if PACKED else CHUNK
    inner = tl.arange(0, STEP)[None, :]
    scales = tl.load(scales_ptr + groups, mask=is_chunk, other=0.0)[:, None]
    zeros = None
    if zeros_ptr is not None:
        zeros = tl.load(zeros_ptr + groups, mask=is_chunk, other=0)[:, None]
    firsts, mask = chunks.to(tl.int64)[:, None], is_chunk[:, None]
    codes = tl.load(codes_ptr + firsts * STEP + inner, mask=mask, other=0)
    out_ptrs = out_ptr + firsts * CHUNK + inner
    dtype = out_ptr.dtype.element_ty
    if PACKED:
        tl.store(out_ptrs, (_widened(codes & 15, zeros, tl.float32, FLOAT) * scales).to(dtype), mask=mask)
        high = _widened(codes >> 4, zeros, tl.float32, FLOAT) * scales
        tl.store(out_ptrs + STEP, high.to(dtype), mask=mask)
    else:
        tl.store(out_ptrs, (_widened(codes, zeros, tl.float32, FLOAT) * scales).to(dtype), mask=mask)


def widened(weight: TiledWeight, dtype: torch.dtype) -> torch.Tensor:
    """Return `weight.numbers()` rounded to this dtype, [out_features, in_features]."""
    out_features, in_features = len(weight.codes), weight.in_features
    out = torch.empty(out_features, in_features, dtype=dtype, device=weight.codes.device)
    num_chunks, launch = out.numel() // weight.chunk, LAUNCHES["widen"]
    block = launch.block // weight.chunk
    widen_kernel[(triton.cdiv(num_chunks, block),)](
        out,
        weight.codes,
        weight.scales,
        weight.zeros,
        num_chunks,
        num_chunks // weight.scales.numel(),
        PACKED=weight.is_packed,
        FLOAT=weight.is_float,
        CHUNK=weight.chunk,
        BLOCK=block,
        num_warps=launch.num_warps,
    )
    return out


def grouped_matmul(x: torch.Tensor, weight: TiledWeight) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.grouped_matmul`."""
    num_rows, out_features = len(x), len(weight.codes)
    if num_rows > MOST_UNWIDENED_ROWS and x.element_size() == 2:
        return torch.nn.functional.linear(x, widened(weight, x.dtype))
    out = x.new_empty(num_rows, out_features)
    if num_rows == 0:
        return out
    tile = matmul_tile(num_rows, x.element_size())
    grid = (triton.cdiv(out_features, tile.block_n), triton.cdiv(num_rows, tile.block_m))
    grouped_matmul_kernel[grid](
        out,
        x,
        weight.codes,
        weight.scales,
        weight.zeros,
        num_rows,
        out_features,
        weight.in_features,
        x.stride(0),
        weight.in_features // weight.chunk // weight.scales.shape[1],
        PACKED=weight.is_packed,
        FLOAT=weight.is_float,
        CHUNK=weight.chunk,
        BLOCK_M=tile.block_m,
        BLOCK_N=tile.block_n,
        num_warps=tile.num_warps,
        num_stages=tile.num_stages,
    )
    return out
