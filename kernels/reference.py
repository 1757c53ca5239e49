"""The operators in plain torch, one row at a time: the twins that every other face is compared with.

Computed in fp32, or in fp64 where the inputs are fp64. Simple before fast; works on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.metadata import AttentionMetadata


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.dispatch.reshape_and_cache`."""
    block_size = key_cache.shape[2]
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    blocks, offsets = slots // block_size, slots % block_size
    key_cache[blocks, :, offsets] = key[is_real].to(key_cache.dtype)
    value_cache[blocks, :, offsets] = value[is_real].to(value_cache.dtype)


def copy_blocks(
    key_cache: torch.Tensor, value_cache: torch.Tensor, block_pairs: Sequence[tuple[int, int]]
) -> None:
    """See `kernels.dispatch.copy_blocks`."""
    if not block_pairs:
        return
    sources, destinations = torch.tensor(block_pairs, device=key_cache.device).unbind(1)
    key_cache[destinations] = key_cache[sources]
    value_cache[destinations] = value_cache[sources]


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
    """See `kernels.dispatch.paged_attention`. Padded tokens come out as zeros here."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    start = 0
    rows = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    for row, (query_len, seq_len) in enumerate(rows):
        if query_len > 0 and seq_len > 0:
            # Blocks wholly before the first query token's window may have been freed: do not touch them.
            first_key = max(0, seq_len - query_len + 1 - sliding_window) if sliding_window else 0
            table = metadata.block_tables[row]
            keys, first_position = _gather(key_cache, table, first_key, seq_len)
            values, _ = _gather(value_cache, table, first_key, seq_len)
            out[start : start + query_len] = _attend(
                query[start : start + query_len],
                keys,
                values,
                first_position,
                scale,
                alibi_slopes,
                sliding_window,
                softcap,
            ).to(out.dtype)
        start += query_len
    return out


def _gather(
    cache: torch.Tensor, table: torch.Tensor, first_key: int, seq_len: int
) -> tuple[torch.Tensor, int]:
    """One row's slots [num_kv_heads, n, head_dim] up to `seq_len`, and the position of the first of them."""
    block_size = cache.shape[2]
    first_block = first_key // block_size
    blocks = table[first_block : -(-seq_len // block_size)].long()
    slots = cache[blocks].transpose(0, 1).flatten(1, 2)
    first_position = first_block * block_size
    # Within the first block, keys before the window may be anything: zeros, so that 0 * NaN cannot arise.
    slots[:, : first_key - first_position] = 0
    return slots[:, : seq_len - first_position], first_position


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
    values: torch.Tensor,
    first_position: int,  # of keys[:, 0]
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> torch.Tensor:
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    num_kv_heads, num_keys, _ = keys.shape
    query_len, num_heads, _ = query.shape
    keys = keys.to(compute_dtype).repeat_interleave(num_heads // num_kv_heads, dim=0)
    values = values.to(compute_dtype).repeat_interleave(num_heads // num_kv_heads, dim=0)

    scores = query.to(compute_dtype).transpose(0, 1) @ keys.transpose(1, 2) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    key_positions = first_position + torch.arange(num_keys, device=query.device)
    query_positions = key_positions[-1] - query_len + 1 + torch.arange(query_len, device=query.device)
    distances = key_positions[None, :] - query_positions[:, None]
    if alibi_slopes is not None:
        # Relative to the query: softmax cancels the difference to absolute positions, rounding does not grow.
        scores = scores + alibi_slopes.to(compute_dtype)[:, None, None] * distances
    hidden = distances > 0
    if sliding_window:
        hidden = hidden | (distances <= -sliding_window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
