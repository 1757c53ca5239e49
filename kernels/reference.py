"""The operators in plain torch, one row at a time: the twins that every other face is compared with.

Computed in fp32, or in fp64 where the inputs are fp64. Simple before fast; works on any device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.layer_cache import SMALLEST_PEAK, LayerCache, as_bytes, largest_number
from kernels.metadata import AttentionMetadata
from kernels.scoring import Scoring


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """See `kernels.dispatch.reshape_and_cache`."""
    is_real = slot_mapping >= 0
    slots = slot_mapping[is_real]
    blocks, offsets = slots // cache.block_size, slots % cache.block_size
    for tokens, target, scales in (
        (key, cache.keys, cache.key_scales),
        (value, cache.values, cache.value_scales),
    ):
        numbers = tokens[is_real]
        if scales is not None:
            numbers, scale = quantise(numbers, target.dtype)
            scales[blocks, :, offsets] = scale
        as_bytes(target)[blocks, :, offsets] = as_bytes(numbers.to(target.dtype))


def quantise(numbers: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(what an int8 or fp8 cache stores, fp32 scales): one scale per vector of the last dimension."""
    limit = largest_number(dtype)
    assert limit is not None, f"{dtype} is stored as it is"
    numbers = numbers.float()
    scales = numbers.abs().amax(dim=-1).clamp(min=SMALLEST_PEAK) / limit
    scaled = (numbers / scales[..., None]).clamp(-limit, limit)
    return (scaled.round() if dtype is torch.int8 else scaled).to(dtype), scales


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
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """See `kernels.dispatch.paged_attention`. Padded tokens come out as zeros here."""
    out = torch.zeros_like(query, memory_format=torch.contiguous_format)
    compute_dtype = torch.promote_types(query.dtype, torch.float32)
    start = 0
    rows = zip(metadata.query_lens_host, metadata.seq_lens_host, strict=True)
    for row, (query_len, seq_len) in enumerate(rows):
        if query_len > 0 and seq_len > 0:
            # Blocks wholly before the first query token's window may have been freed: do not touch them.
            window = scoring.sliding_window
            first_key = max(0, seq_len - query_len + 1 - window) if window else 0
            span = _Span(metadata.block_tables[row], cache.block_size, first_key, seq_len)
            out[start : start + query_len] = _attend(
                query[start : start + query_len].to(compute_dtype),
                span.gather(cache.keys, cache.key_scales, compute_dtype),
                span.gather(cache.values, cache.value_scales, compute_dtype),
                span.first_position,
                scoring,
            ).to(out.dtype)
        start += query_len
    return out


class _Span:
    """A row's slots from the block that holds `first_key` up to `seq_len`."""

    def __init__(self, table: torch.Tensor, block_size: int, first_key: int, seq_len: int) -> None:
        first_block = first_key // block_size
        self._blocks = table[first_block : -(-seq_len // block_size)].long()
        self.first_position = first_block * block_size
        self._num_unseen = first_key - self.first_position
        self._length = seq_len - self.first_position

    def gather(self, cache: torch.Tensor, scales: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """The slots' numbers, [num_kv_heads, n, head_dim]."""
        slots = as_bytes(cache)[self._blocks].view(cache.dtype).to(dtype)
        if scales is not None:
            slots = slots * scales[self._blocks].to(dtype)[..., None]
        slots = slots.transpose(0, 1).flatten(1, 2)
        # Within the first block, keys before the window may be anything: zeros, so that 0 * NaN cannot arise.
        slots[:, : self._num_unseen] = 0
        return slots[:, : self._length]


def _attend(
    query: torch.Tensor,  # [query_len, num_heads, head_dim]
    keys: torch.Tensor,  # [num_kv_heads, n, head_dim]
    values: torch.Tensor,
    first_position: int,  # of keys[:, 0]
    scoring: Scoring,
) -> torch.Tensor:
    num_kv_heads, num_keys, _ = keys.shape
    query_len, num_heads, _ = query.shape
    keys = keys.repeat_interleave(num_heads // num_kv_heads, dim=0)
    values = values.repeat_interleave(num_heads // num_kv_heads, dim=0)

    scores = query.transpose(0, 1) @ keys.transpose(1, 2) * scoring.scale
    if scoring.softcap:
        scores = scoring.softcap * torch.tanh(scores / scoring.softcap)
    key_positions = first_position + torch.arange(num_keys, device=query.device)
    query_positions = key_positions[-1] - query_len + 1 + torch.arange(query_len, device=query.device)
    distances = key_positions[None, :] - query_positions[:, None]
    if scoring.alibi_slopes is not None:
        # Relative to the query: softmax cancels the difference to absolute positions, rounding does not grow.
        scores = scores + scoring.alibi_slopes.to(query.dtype)[:, None, None] * distances
    hidden = distances > 0
    if scoring.sliding_window:
        hidden = hidden | (distances <= -scoring.sliding_window)
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return (weights @ values).transpose(0, 1)
