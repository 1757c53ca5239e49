"""Paged attention on a GPU: two Triton kernels, or the library named by the cache if it supports the layer."""

from __future__ import annotations

import logging
from functools import cache

import torch

from pagemill.kernels.gpu.attention_backend import PagedAttentionBackend
from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill
from pagemill.kernels.gpu.flash_attention import FlashAttention3
from pagemill.kernels.gpu.flashinfer import FlashInfer
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring

logger = logging.getLogger(__name__)


LIBRARIES: dict[str, PagedAttentionBackend] = {"fa3": FlashAttention3(), "flashinfer": FlashInfer()}
"""Libraries by `LayerCache.attention`."""


def paged_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.paged_attention`."""
    library = LIBRARIES.get(cache.attention)
    if library is None:
        return _by_kernels(query, cache, metadata, scoring)
    reason = library.unsupported(query, cache, scoring)
    if reason is not None:
        _warn(cache.attention, reason)
        return _by_kernels(query, cache, metadata, scoring)
    return library.attend(query, cache, metadata, scoring)


@cache
def _warn(name: str, reason: str) -> None:
    """Log once which layers a library does not support."""
    logger.warning("attention backend %s does not support %s; Triton computes these layers", name, reason)


def _by_kernels(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """Run two kernels, for a step's decode rows and for the rest: one kernel for both would pipeline neither."""
    out = query.new_empty(query.shape)
    num_decode_rows = metadata.num_decode_rows
    if num_decode_rows > 0:
        paged_attention_decode(
            out[:num_decode_rows],
            query[:num_decode_rows],
            cache,
            metadata.block_tables[:num_decode_rows],
            metadata.seq_lens[:num_decode_rows],
            scoring,
            max_seq_len=metadata.max_seq_len,
        )
    if num_decode_rows < len(metadata.query_lens_host):
        paged_attention_prefill(out, query, cache, metadata, scoring)
    return out
