"""The operators' fast face for CPU tensors. Contracts: `kernels.dispatch`.

Only fp32 is fast: other dtypes take the plain torch way.
"""

from __future__ import annotations

import ctypes
import mmap

import torch

from kernels import cpu_cache, cpu_fused, reference
from kernels.cpu_attention_decode import decode
from kernels.cpu_attention_prefill import prefill
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
    if not query.dtype == key_cache.dtype == value_cache.dtype == torch.float32:
        return reference.paged_attention(
            query,
            key_cache,
            value_cache,
            metadata,
            scale=scale,
            alibi_slopes=alibi_slopes,
            sliding_window=sliding_window,
            softcap=softcap,
        )
    tables, starts, seq_lens = metadata.block_tables, metadata.query_start_loc, metadata.seq_lens
    # The kernels take addresses at their word.
    assert key_cache.is_contiguous()
    assert value_cache.is_contiguous()
    assert query.stride(2) == tables.stride(1) == 1
    assert tables.dtype == starts.dtype == seq_lens.dtype == torch.int32
    assert alibi_slopes is None or (alibi_slopes.dtype == torch.float32 and alibi_slopes.is_contiguous())

    out = torch.empty(query.shape)
    num_tokens, num_heads, head_dim = query.shape
    num_kv_heads, block_size = key_cache.shape[1:3]
    num_rows, num_decode_rows = len(metadata.seq_lens_host), metadata.num_decode_rows
    group = num_heads // num_kv_heads
    num_threads = use_torch_threads()
    views = (
        out.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        key_cache.data_ptr(),
        value_cache.data_ptr(),
        tables.data_ptr(),
        tables.stride(0),
    )
    slopes = 0 if alibi_slopes is None else alibi_slopes.data_ptr()
    scoring = (float(scale), sliding_window or 0, float(softcap or 0.0), slopes, num_threads)
    if num_decode_rows:
        decode(
            *views,
            seq_lens.data_ptr(),
            num_decode_rows,
            *(num_kv_heads, group, head_dim, block_size),
            metadata.max_seq_len,
            *scoring,
        )
    if num_decode_rows < num_rows:
        prefill(
            *views,
            starts.data_ptr(),
            seq_lens.data_ptr(),
            *(num_decode_rows, num_rows, num_tokens),
            *(num_kv_heads, group, head_dim, block_size),
            *scoring,
        )
    num_padded = num_tokens - sum(metadata.query_lens_host)
    if num_padded:
        out[-num_padded:] = 0
    return out


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
        block_tables=torch.zeros(2, 1, dtype=torch.int32),
        query_start_loc=torch.tensor([0, 1, 3], dtype=torch.int32),
        seq_lens=torch.tensor([1, 2], dtype=torch.int32),
        slot_mapping=torch.full((3,), -1),
        query_lens_host=[1, 2],
        seq_lens_host=[1, 2],
        num_decode_rows=1,
        max_query_len=2,
        max_seq_len=2,
    )
    paged_attention(query[:3], key_cache, value_cache, metadata, scale=1.0)


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
