"""Scatter a step's new keys and values into their slots of the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.rounding import to_e4m3, to_integers
from pagemill.kernels.gpu.tuning import LAUNCHES, next_power_of_2
from pagemill.kernels.types.layer_cache import SMALLEST_PEAK, LayerCache, as_bytes, largest_number

# 16 tokens of 128 dims are two 16-byte accesses per thread and tensor with four warps. Not yet measured on a
# GPU.
_LAUNCH = LAUNCHES["reshape_and_cache"]
_SMALLEST_PEAK = tl.constexpr(SMALLEST_PEAK)


@triton.jit
def store_tokens(
    tokens,  # [BLOCK_TOKENS, HEAD_DIM_PADDED], zeros at padding
    cache_ptr,
    scales_ptr,
    offsets,  # [BLOCK_TOKENS] of the slots in the cache
    slots_of_scales,  # [BLOCK_TOKENS]
    is_token,
    is_element,
    dims,
    LIMIT: tl.constexpr,  # the cache dtype's largest value if it is scaled, or 0
    INTEGER: tl.constexpr,
):
    """Store a tile of one head's keys or values, with one scale per token if the cache has scales."""
    if LIMIT > 0:
        tokens = tokens.to(tl.float32)
        scales = tl.maximum(tl.max(tl.abs(tokens), 1), _SMALLEST_PEAK) / LIMIT
        tl.store(scales_ptr + slots_of_scales, scales, mask=is_token)
        tokens = tl.minimum(tl.maximum(tokens / scales[:, None], -LIMIT), LIMIT)
        if INTEGER:
            tokens = to_integers(tokens)
        else:
            tokens = to_e4m3(tokens)
    element = cache_ptr.dtype.element_ty
    tl.store(cache_ptr + offsets[:, None] + dims[None, :], tokens.to(element), mask=is_element)


# Not specialized, because the value changes between steps: compiling another kernel would stall serving.
@triton.jit(do_not_specialize=["num_tokens"])
def reshape_and_cache_kernel(
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value_ptr,
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scales_ptr,  # fp32 [num_blocks, num_kv_heads, BLOCK_SIZE], or None
    value_scales_ptr,
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
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
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
    blocks, in_block = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    offsets = blocks * stride_cache_block + kv_head * stride_cache_head + in_block * HEAD_DIM
    scale_slots = (blocks * (stride_cache_block // stride_cache_head) + kv_head) * BLOCK_SIZE + in_block
    store_tokens(
        key,
        key_cache_ptr,
        key_scales_ptr,
        offsets,
        scale_slots,
        slots >= 0,
        is_element,
        dims,
        LIMIT,
        INTEGER,
    )
    store_tokens(
        value,
        value_cache_ptr,
        value_scales_ptr,
        offsets,
        scale_slots,
        slots >= 0,
        is_element,
        dims,
        LIMIT,
        INTEGER,
    )


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """See `pagemill.kernels.dispatch.reshape_and_cache`."""
    num_tokens, num_kv_heads, head_dim = key.shape
    if num_tokens == 0:
        return
    reshape_and_cache_kernel[(triton.cdiv(num_tokens, _LAUNCH.block), num_kv_heads)](
        key,
        value,
        as_bytes(cache.keys),
        as_bytes(cache.values),
        cache.key_scales,
        cache.value_scales,
        slot_mapping,
        num_tokens,
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        cache.keys.stride(0),
        cache.keys.stride(1),
        BLOCK_SIZE=cache.block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=next_power_of_2(head_dim),
        BLOCK_TOKENS=_LAUNCH.block,
        LIMIT=largest_number(cache.keys.dtype) or 0.0,
        INTEGER=cache.keys.dtype is torch.int8,
        num_warps=_LAUNCH.num_warps,
    )
