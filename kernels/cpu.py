"""The operators' fast face for CPU tensors. Contracts: `kernels.dispatch`.

Only fp32 is fast: other dtypes are attended to through an fp32 copy of the blocks in use.
"""

from __future__ import annotations

import ctypes
import math
import mmap

import torch
import torch.nn.functional as F

from kernels import cpu_attention, cpu_cache, cpu_fused, reference
from kernels.cpu_jit import NUMBERS_PER_THREAD, run_rows, use_torch_threads
from kernels.metadata import AttentionMetadata
from kernels.reference import copy_blocks

__all__ = ["advise_huge_pages", "copy_blocks", "paged_attention", "reshape_and_cache", "warm_up"]


def reshape_and_cache(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
) -> None:
    """See `kernels.dispatch.reshape_and_cache`."""
    if not key.dtype == value.dtype == key_cache.dtype == value_cache.dtype == torch.float32:
        reference.reshape_and_cache(key, value, key_cache, value_cache, slot_mapping)
        return
    assert slot_mapping.dtype == torch.int64
    num_tokens, num_kv_heads, head_dim = key.shape
    arguments = (
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        slot_mapping.data_ptr(),
        num_kv_heads,
        key_cache.shape[2],
        head_dim,
    )
    row_size = 2 * num_kv_heads * head_dim
    run_rows(cpu_cache.write_tokens, cpu_cache.write_tokens_parallel, num_tokens, row_size, arguments)


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
        _decode(out, query, key_cache, value_cache, metadata, scale, alibi_slopes, sliding_window, softcap)
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


def _decode(
    out: torch.Tensor,
    query: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    metadata: AttentionMetadata,
    scale: float,
    alibi_slopes: torch.Tensor | None,
    sliding_window: int | None,
    softcap: float | None,
) -> None:
    tables = metadata.block_tables
    # The kernel takes addresses at their word.
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert query.stride(2) == tables.stride(1) == 1
    assert tables.dtype == metadata.seq_lens.dtype == torch.int32
    assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and alibi_slopes.is_contiguous())
    _, num_kv_heads, block_size, head_dim = key_cache.shape
    cpu_attention.decode(
        out.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
        metadata.seq_lens.data_ptr(),
        metadata.num_decode_rows,
        num_kv_heads,
        query.shape[1] // num_kv_heads,
        head_dim,
        block_size,
        metadata.max_seq_len,
        float(scale),
        sliding_window or 0,
        float(softcap or 0.0),
        0 if alibi_slopes is None else alibi_slopes.data_ptr(),
        use_torch_threads(),
    )


def warm_up(num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> None:
    """Compile every kernel, or load it from the disk, so that no step pays for it: seconds the first time."""
    # One token takes a kernel's serial form, this many its parallel one.
    many = -(-2 * NUMBERS_PER_THREAD // (num_kv_heads * head_dim))
    query, key, value = torch.zeros(many, num_heads + 2 * num_kv_heads, head_dim).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    key_cache, value_cache = torch.zeros(2, 1, num_kv_heads, block_size, head_dim)
    angles = torch.zeros(many, head_dim)
    rows = torch.zeros(many, 2 * num_kv_heads * head_dim)
    for n in (1, many):
        reshape_and_cache(key[:n], value[:n], key_cache, value_cache, torch.full((n,), -1))
        cpu_fused.rotary_embedding(query[:n], key[:n], angles[:n], angles[:n])
        cpu_fused.rms_norm(rows[:n], rows[0], 1e-5)
        cpu_fused.silu_and_mul(rows[:n])
    metadata = AttentionMetadata(
        block_tables=torch.zeros(1, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1], dtype=torch.int32),
        seq_lens=torch.ones(1, dtype=torch.int32),
        slot_mapping=torch.zeros(1, dtype=torch.int64),
        query_lens_host=[1],
        seq_lens_host=[1],
        num_decode_rows=1,
        max_query_len=1,
        max_seq_len=1,
    )
    paged_attention(query[:1], key_cache, value_cache, metadata, scale=1.0)


def advise_huge_pages(tensor: torch.Tensor) -> bool:
    """Ask the kernel to back a fresh, large tensor with huge pages; tell whether it took the advice.

    Walking scattered blocks misses the TLB at every tile otherwise: a sixth of decode attention's time. Call it
    before the memory is first written.
    """
    madvise_huge_page = getattr(mmap, "MADV_HUGEPAGE", None)
    if madvise_huge_page is None:
        return False
    begin = -(-tensor.data_ptr() // mmap.PAGESIZE) * mmap.PAGESIZE
    end = (tensor.data_ptr() + tensor.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    if end <= begin:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), madvise_huge_page) == 0


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

    is_plain_causal = (
        alibi_slopes is None and softcap is None and not sliding_window and query_len == num_keys
    )
    bias = torch.zeros(query_len, num_keys)
    if not is_plain_causal:
        key_positions = torch.arange(first_key, first_key + num_keys)
        query_positions = key_positions[-query_len:, None]
        hidden = key_positions > query_positions
        if sliding_window:
            hidden |= key_positions <= query_positions - sliding_window
        bias.masked_fill_(hidden, -math.inf)
        if alibi_slopes is not None:
            slopes = alibi_slopes.float().view(num_kv_heads, group, 1, 1)
            bias = bias + slopes * (
                key_positions - query_positions
            )  # relative: rounds less, softmax cancels it
    if softcap is None:
        attended = F.scaled_dot_product_attention(
            packed,
            keys,
            values,
            attn_mask=None if is_plain_causal else bias,
            is_causal=is_plain_causal,
            scale=scale,
        )
    else:
        scores = (packed * scale) @ keys.transpose(-1, -2)
        attended = (torch.tanh(scores / softcap) * softcap + bias).softmax(-1) @ values
    return attended.permute(2, 0, 1, 3).reshape(query_len, num_heads, head_dim)
