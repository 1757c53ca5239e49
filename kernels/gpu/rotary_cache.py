"""One kernel for the work on queries, keys and values between their projection and attention.

It normalizes each query and key head if the model has such norms, rotates them, and writes keys and values to
the paged cache, quantized if the cache is. Separately, these are five passes over memory.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pagemill.kernels.gpu.cache import store_tokens
from pagemill.kernels.gpu.tuning import LAUNCHES, next_power_of_2
from pagemill.kernels.types.layer_cache import LayerCache, as_bytes, largest_number
from pagemill.kernels.types.rotation import Rotation

# Values of one head per program: a 16-byte access per thread and tensor with four warps of bf16. Not yet
# measured on a GPU.
_LAUNCH = LAUNCHES["rotary_cache"]


def block_tokens(head_dim: int) -> int:
    """Number of tokens of one head per program."""
    return max(1, _LAUNCH.block // next_power_of_2(head_dim))


@triton.jit
def _rotated_heads(
    heads_ptr,  # the head's first value in token 0
    tokens,  # [BLOCK_TOKENS]
    is_token,  # [BLOCK_TOKENS]
    norm_weight_ptr,  # [HEAD_DIM], or None
    cos_ptr,  # [num_tokens, ROTARY_DIM]
    sin_ptr,
    stride_token,
    stride_angles,
    eps,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
):
    """One head of some tokens, [BLOCK_TOKENS, HEAD_DIM_PADDED] fp32: normalized, then rotated."""
    dims = tl.arange(0, HEAD_DIM_PADDED)
    is_element = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    rows = heads_ptr + tokens[:, None] * stride_token
    x = tl.load(rows + dims[None, :], mask=is_element, other=0.0).to(tl.float32)
    factor = tl.full(tokens.shape, 1.0, tl.float32)
    if norm_weight_ptr is not None:
        factor = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / HEAD_DIM + eps)
        weight = tl.load(norm_weight_ptr + dims, mask=dims < HEAD_DIM, other=0.0).to(tl.float32)
        x = x * factor[:, None] * weight[None, :]
    if ROTARY_DIM > 0:
        HALF: tl.constexpr = ROTARY_DIM // 2
        rotates = is_token[:, None] & (dims < ROTARY_DIM)[None, :]
        partners = tl.where(dims < HALF, dims + HALF, dims - HALF)
        partner = tl.load(rows + partners[None, :], mask=rotates, other=0.0).to(tl.float32)
        if norm_weight_ptr is not None:
            weight = tl.load(norm_weight_ptr + partners, mask=dims < ROTARY_DIM, other=0.0).to(tl.float32)
            partner = partner * factor[:, None] * weight[None, :]
        partner = tl.where((dims < HALF)[None, :], -partner, partner)
        angles = tokens[:, None] * stride_angles + dims[None, :]
        cos = tl.load(cos_ptr + angles, mask=rotates, other=1.0).to(tl.float32)
        sin = tl.load(sin_ptr + angles, mask=rotates, other=0.0).to(tl.float32)
        x = x * cos + partner * sin
    return x


# Not specialized, because the value changes between steps: compiling another kernel would stall serving.
@triton.jit(do_not_specialize=["num_tokens"])
def rotary_cache_kernel(
    out_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]: the queries
    query_ptr,  # [num_tokens, NUM_HEADS, HEAD_DIM]
    key_ptr,  # [num_tokens, num_kv_heads, HEAD_DIM]
    value_ptr,
    query_weight_ptr,  # [HEAD_DIM], or None
    key_weight_ptr,
    cos_ptr,  # [num_tokens, ROTARY_DIM], or None
    sin_ptr,
    key_cache_ptr,  # [num_blocks, num_kv_heads, BLOCK_SIZE, HEAD_DIM]
    value_cache_ptr,
    key_scales_ptr,  # fp32 [num_blocks, num_kv_heads, BLOCK_SIZE], or None
    value_scales_ptr,
    slot_mapping_ptr,  # [num_tokens] int64, -1 = padded
    num_tokens,
    stride_query_token,
    stride_query_head,
    stride_key_token,
    stride_key_head,
    stride_value_token,
    stride_value_head,
    stride_angles,
    stride_cache_block,
    stride_cache_head,
    eps,
    NUM_HEADS: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    ROTARY_DIM: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr,
    LIMIT: tl.constexpr,
    INTEGER: tl.constexpr,
):
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    dims = tl.arange(0, HEAD_DIM_PADDED)
    if head < NUM_HEADS:
        is_token = tokens < num_tokens
        query = _rotated_heads(
            query_ptr + head * stride_query_head, tokens, is_token, query_weight_ptr, cos_ptr, sin_ptr,
            stride_query_token, stride_angles, eps, HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM,
        )  # fmt: skip
        # Not in place: another warp can still read a value's partner.
        tl.store(
            out_ptr + (tokens[:, None] * NUM_HEADS + head) * HEAD_DIM + dims[None, :],
            query.to(out_ptr.dtype.element_ty),
            mask=is_token[:, None] & (dims < HEAD_DIM)[None, :],
        )
        return

    kv_head = (head - NUM_HEADS).to(tl.int64)
    slots = tl.load(slot_mapping_ptr + tokens, mask=tokens < num_tokens, other=-1)
    is_token = slots >= 0
    is_element = is_token[:, None] & (dims < HEAD_DIM)[None, :]
    key = _rotated_heads(
        key_ptr + kv_head * stride_key_head, tokens, is_token, key_weight_ptr, cos_ptr, sin_ptr,
        stride_key_token, stride_angles, eps, HEAD_DIM, HEAD_DIM_PADDED, ROTARY_DIM,
    )  # fmt: skip
    value = tl.load(
        value_ptr + tokens[:, None] * stride_value_token + kv_head * stride_value_head + dims[None, :],
        mask=is_element,
        other=0.0,
    )
    blocks, in_block = slots // BLOCK_SIZE, slots % BLOCK_SIZE
    offsets = blocks * stride_cache_block + kv_head * stride_cache_head + in_block * HEAD_DIM
    scale_slots = (blocks * (stride_cache_block // stride_cache_head) + kv_head) * BLOCK_SIZE + in_block
    store_tokens(
        key.to(value.dtype), key_cache_ptr, key_scales_ptr, offsets, scale_slots, is_token, is_element, dims,
        LIMIT, INTEGER,
    )  # fmt: skip
    store_tokens(
        value, value_cache_ptr, value_scales_ptr, offsets, scale_slots, is_token, is_element, dims,
        LIMIT, INTEGER,
    )  # fmt: skip


def rotary_and_cache(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotation: Rotation,
    cache: LayerCache,
    slot_mapping: torch.Tensor,
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.rotary_and_cache`."""
    num_tokens, num_heads, head_dim = query.shape
    out = query.new_empty(query.shape)
    if num_tokens == 0:
        return out
    cos, sin = rotation.cos, rotation.sin
    num_blocks = triton.cdiv(num_tokens, block_tokens(head_dim))
    rotary_cache_kernel[(num_blocks, num_heads + key.shape[1])](
        out,
        query,
        key,
        value,
        rotation.query_weight,
        rotation.key_weight,
        cos,
        sin,
        as_bytes(cache.keys),
        as_bytes(cache.values),
        cache.key_scales,
        cache.value_scales,
        slot_mapping,
        num_tokens,
        query.stride(0),
        query.stride(1),
        key.stride(0),
        key.stride(1),
        value.stride(0),
        value.stride(1),
        0 if cos is None else cos.stride(0),
        cache.keys.stride(0),
        cache.keys.stride(1),
        rotation.eps,
        NUM_HEADS=num_heads,
        BLOCK_SIZE=cache.block_size,
        HEAD_DIM=head_dim,
        HEAD_DIM_PADDED=next_power_of_2(head_dim),
        ROTARY_DIM=rotation.rotary_dim,
        BLOCK_TOKENS=block_tokens(head_dim),
        LIMIT=largest_number(cache.keys.dtype) or 0.0,
        INTEGER=cache.keys.dtype is torch.int8,
        num_warps=_LAUNCH.num_warps,
    )
    return out
