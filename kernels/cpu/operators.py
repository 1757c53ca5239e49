"""The fast implementation of the operators for CPU tensors. Contracts: `pagemill.kernels.dispatch`.

For fp32 models with a cache of any dtype. Half-precision models use plain torch operators.
"""

from __future__ import annotations

import numpy as np
import torch

from pagemill.kernels import reference
from pagemill.kernels.cpu import cache as cpu_cache
from pagemill.kernels.cpu import fused_rows
from pagemill.kernels.cpu.attention.decode import decode
from pagemill.kernels.cpu.attention.prefill import prefill
from pagemill.kernels.cpu.attention.sharing import sharing_of
from pagemill.kernels.cpu.jit.compiler import run_rows, use_torch_threads
from pagemill.kernels.cpu.jit.element import element_of
from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.matmul import low_rank
from pagemill.kernels.cpu.sampling import argmax as cpu_argmax
from pagemill.kernels.cpu.sampling import noise as cpu_noise
from pagemill.kernels.cpu.sampling import selection as cpu_selection
from pagemill.kernels.reference import copy_blocks
from pagemill.kernels.types.layer_cache import LayerCache, allocate_layer, largest_number
from pagemill.kernels.types.low_rank import AdapterRows, LowRankTable
from pagemill.kernels.types.metadata import AttentionMetadata, warm_up_metadata
from pagemill.kernels.types.scoring import Scoring

__all__ = [
    "add_low_rank",
    "advise_huge_pages",
    "copy_blocks",
    "paged_attention",
    "reshape_and_cache",
    "silu_and_mul",
    "warm_up",
    "warm_up_layers",
]


def reshape_and_cache(
    key: torch.Tensor, value: torch.Tensor, cache: LayerCache, slot_mapping: torch.Tensor
) -> None:
    """See `pagemill.kernels.dispatch.reshape_and_cache`."""
    if not key.dtype == value.dtype == torch.float32:
        reference.reshape_and_cache(key, value, cache, slot_mapping)
        return
    assert slot_mapping.dtype == torch.int64
    num_tokens, num_kv_heads, head_dim = key.shape
    arguments = (
        element_of(cache.keys.dtype),
        key.data_ptr(),
        key.stride(0),
        key.stride(1),
        value.data_ptr(),
        value.stride(0),
        value.stride(1),
        *_addresses(cache),
        np.float32(largest_number(cache.keys.dtype) or 0.0),
        slot_mapping.data_ptr(),
        num_kv_heads,
        cache.block_size,
        head_dim,
    )
    row_size = 2 * num_kv_heads * head_dim
    run_rows(cpu_cache.write_tokens_parallel, num_tokens, row_size, arguments)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.silu_and_mul`."""
    is_float = gate_up.dtype is torch.float32
    return fused_rows.silu_and_mul(gate_up) if is_float else reference.silu_and_mul(gate_up)


def _addresses(cache: LayerCache) -> tuple[int, int, int, int]:
    key_scales, value_scales = cache.key_scales, cache.value_scales
    return (
        cache.keys.data_ptr(),
        cache.values.data_ptr(),
        0 if key_scales is None else key_scales.data_ptr(),
        0 if value_scales is None else value_scales.data_ptr(),
    )


def _address_of(per_head: torch.Tensor | None) -> int:
    assert per_head is None or (per_head.dtype == torch.float32 and per_head.is_contiguous())
    return 0 if per_head is None else per_head.data_ptr()


def paged_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.paged_attention`. Padded rows and tokens become zeros here."""
    if query.dtype != torch.float32:
        return reference.paged_attention(query, cache, metadata, scoring)
    tables, starts, seq_lens = metadata.block_tables, metadata.query_start_loc, metadata.seq_lens
    # The kernels do not check addresses.
    assert all(tensor.is_contiguous() for tensor in cache.tensors())
    assert query.stride(2) == tables.stride(1) == 1
    assert tables.dtype == starts.dtype == seq_lens.dtype == torch.int32

    out = torch.empty(query.shape)
    num_tokens, num_heads, head_dim = query.shape
    num_rows, num_decode_rows = len(metadata.seq_lens_host), metadata.num_decode_rows
    heads = (cache.num_kv_heads, num_heads // cache.num_kv_heads, head_dim, cache.block_size)
    views = (
        out.data_ptr(),
        query.data_ptr(),
        query.stride(0),
        query.stride(1),
        element_of(cache.keys.dtype, rounds=scoring.rounds_to_cache),
        *_addresses(cache),
        tables.data_ptr(),
        tables.stride(0),
    )
    numbers = (
        float(scoring.scale),
        scoring.sliding_window or 0,
        float(scoring.softcap or 0.0),
        _address_of(scoring.alibi_slopes),
        _address_of(scoring.sinks),
        use_torch_threads(),
    )
    if num_decode_rows:
        decode(*views, seq_lens.data_ptr(), sharing_of(metadata), num_decode_rows, *heads, *numbers)
    if num_decode_rows < num_rows:
        lengths = (starts.data_ptr(), seq_lens.data_ptr())
        prefill(*views, *lengths, num_decode_rows, num_rows, num_tokens, *heads, *numbers)
    num_padded = num_tokens - sum(metadata.query_lens_host)
    if num_padded:
        out[-num_padded:] = 0
    return out


def add_low_rank(out: torch.Tensor, x: torch.Tensor, table: LowRankTable, rows: AdapterRows) -> None:
    """See `pagemill.kernels.dispatch.add_low_rank`."""
    if x.dtype == torch.float32:
        low_rank.add_low_rank(out, x, table, rows)
    else:
        reference.add_low_rank(out, x, table, rows)


def warm_up() -> None:
    """Compile the kernels of every model, or load them from disk, so that no step is delayed."""
    rows = torch.zeros(1, 64)
    fused_rows.rms_norm(rows, rows[0], 1e-5)
    cpu_argmax.warm_up()
    cpu_noise.warm_up()
    cpu_selection.warm_up()


def warm_up_layers(
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    cache_dtype: torch.dtype = torch.float32,
    rounds_to_cache: bool = False,
) -> None:
    """Compile, or load from disk, the operators of layers that are called separately."""
    query, key, value = torch.zeros(3, num_heads + 2 * num_kv_heads, head_dim).split(
        [num_heads, num_kv_heads, num_kv_heads], dim=1
    )
    cache = allocate_layer(1, num_kv_heads, block_size, head_dim, cache_dtype)
    angles = torch.zeros(3, head_dim)
    reshape_and_cache(key, value, cache, torch.full((3,), -1))
    fused_rows.rotary_embedding(query, key, angles, angles)
    fused_rows.silu_and_mul(torch.zeros(1, 2 * head_dim))
    paged_attention(query, cache, warm_up_metadata(), Scoring(1.0, rounds_to_cache=rounds_to_cache))
