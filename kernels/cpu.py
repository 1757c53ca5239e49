"""The operators' fast face for CPU tensors. Contracts: `kernels.dispatch`.

Only fp32 is fast: other dtypes are attended to through an fp32 copy of the blocks in use.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F

from kernels import cpu_attention
from kernels.cpu_jit import use_torch_threads
from kernels.metadata import AttentionMetadata
from kernels.reference import copy_blocks, reshape_and_cache

__all__ = ["copy_blocks", "paged_attention", "reshape_and_cache"]


def paged_attention(
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    *,
    scale: float,
    alibi_slopes: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
) -> torch.Tensor:
    """See `kernels.dispatch.paged_attention`. Padded rows and tokens come out as zeros here."""
    out = torch.empty(query.shape, dtype=query.dtype)
    is_fast = query.dtype == key_cache.dtype == value_cache.dtype == torch.float32
    num_decode_rows = metadata.num_decode_rows if is_fast else 0
    if num_decode_rows:
        cpu_attention.decode(
            out.data_ptr(),
            query.data_ptr(),
            query.stride(0),
            query.stride(1),
            key_cache.data_ptr(),
            value_cache.data_ptr(),
            metadata.block_tables.data_ptr(),
            metadata.block_tables.stride(0),
            metadata.seq_lens.data_ptr(),
            num_decode_rows,
            key_cache.shape[1],
            query.shape[1] // key_cache.shape[1],
            query.shape[2],
            key_cache.shape[2],
            metadata.max_seq_len,
            scale,
            sliding_window or 0,
            softcap or 0.0,
            0 if alibi_slopes is None else alibi_slopes.data_ptr(),
            use_torch_threads(),
        )
    start = num_decode_rows
    for row in range(num_decode_rows, len(metadata.seq_lens_host)):
        query_len, seq_len = metadata.query_lens_host[row], metadata.seq_lens_host[row]
        rows = out[start : start + query_len]
        if seq_len == 0:
            rows.zero_()
        elif query_len > 0:
            first_key = max(0, seq_len - query_len + 1 - sliding_window) if sliding_window else 0
            blocks = metadata.block_tables[row]
            rows.copy_(
                _attend(
                    query[start : start + query_len].float(),
                    _gather(key_cache, blocks, first_key, seq_len),
                    _gather(value_cache, blocks, first_key, seq_len),
                    first_key,
                    scale,
                    alibi_slopes,
                    sliding_window,
                    softcap,
                )
            )
        start += query_len
    out[start:].zero_()
    return out


def _gather(cache: torch.Tensor, block_table: torch.Tensor, first_key: int, seq_len: int) -> torch.Tensor:
    """Keys (or values) first_key .. seq_len - 1 of one row as [num_kv_heads, num_keys, head_dim], fp32."""
    num_kv_heads, block_size, head_dim = cache.shape[1:]
    first_block = first_key // block_size
    blocks = block_table[first_block : (seq_len - 1) // block_size + 1]
    keys = cache.index_select(0, blocks).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    return keys[:, first_key - first_block * block_size : seq_len - first_block * block_size].float()


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, num_keys, head_dim]
    values: torch.Tensor,
    first_key: int,  # position of keys[:, 0]
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    query_len, num_heads, head_dim = query.shape
    num_kv_heads, num_keys, _ = keys.shape
    group = num_heads // num_kv_heads
    # KV heads as the batch, their queries as its heads: stride 0 over the heads spares repeating the keys.
    packed = query.view(query_len, num_kv_heads, group, head_dim).permute(1, 2, 0, 3)
    keys, values = (x[:, None].expand(-1, group, -1, -1) for x in (keys, values))

    bias = None
    is_plain_causal = (
        alibi_slopes is None and softcap is None and not sliding_window and query_len == num_keys
    )
    if not is_plain_causal:
        key_positions = torch.arange(first_key, first_key + num_keys)
        query_positions = key_positions[-query_len:, None]
        hidden = key_positions > query_positions
        if sliding_window:
            hidden |= key_positions <= query_positions - sliding_window
        bias = torch.zeros(query_len, num_keys).masked_fill_(hidden, -math.inf)
        if alibi_slopes is not None:
            slopes = alibi_slopes.float().view(num_kv_heads, group, 1, 1)
            bias = bias + slopes * (
                key_positions - query_positions
            )  # relative: rounds less, softmax cancels it
    if softcap is None:
        attended = F.scaled_dot_product_attention(
            packed, keys, values, attn_mask=bias, is_causal=bias is None, scale=scale
        )
    else:
        scores = (packed * scale) @ keys.transpose(-1, -2)
        attended = (torch.tanh(scores / softcap) * softcap + bias).softmax(-1) @ values
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
