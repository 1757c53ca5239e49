"""Scatter a step's new keys and values into their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.tuning import next_power_of_2

# 16 tokens of 128 dims are two 16-byte accesses per thread and tensor at four warps. Not yet measured on a
# GPU.
_BLOCK_TOKENS = 16


@triton.jit
def reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value_ptr,
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    slot_mapping_ptr,  # [num_tokens] int64, -1 = padded
    num_tokens,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_cache_block,
    stride_cache_head,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_element = (slots >= 0)[:, None] & (dims < HEAD_DIM)[None, :]

    key = tl.load(
        key_ptr + tokens[:, None] * stride_key_token + kv_head * stride_key_head + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    value = tl.load(
        value_ptr + tokens[:, None] * stride_value_token + kv_head * stride_value_head + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    offsets = (
        (slots // BLOCK_SIZE) * stride_cache_block
        + kv_head * stride_cache_head
        + (slots % BLOCK_SIZE) * HEAD_DIM
    )
    cache_offsets = offsets[:, None] + dims[None, :]
    tl.store(key_cache_ptr + cache_offsets, key.to(key_cache_ptr.dtype.element_ty), mask=is_element)
    tl.store(value_cache_ptr + cache_offsets, value.to(value_cache_ptr.dtype.element_ty), mask=is_element)


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.dispatch.reshape_and_cache`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    reshape_and_cache_kernel[(triton.cdiv(num_tokens, _BLOCK_TOKENS), num_kv_heads)](
        key,
        value,
        key_cache,
        value_cache,
        slot_mapping,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        key_cache.stride(0),
        key_cache.stride(1),
        BLOCK_SIZE=key_cache.shape[2],
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=next_power_of_2(head_dim),
        BLOCK_TOKENS=_BLOCK_TOKENS,
        num_warps=4,
    )
