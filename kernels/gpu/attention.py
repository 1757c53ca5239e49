"""Triton's face of paged attention: the decode kernel for a step's first rows, the prefill kernel for the rest."""

from __future__ import annotations

import torch

from pagemill.kernels.gpu.attention_decode import paged_attention_decode
from pagemill.kernels.gpu.attention_prefill import paged_attention_prefill
from pagemill.kernels.types.layer_cache import LayerCache
from pagemill.kernels.types.metadata import AttentionMetadata
from pagemill.kernels.types.scoring import Scoring


def paged_attention(
    query: torch.Tensor, cache: LayerCache, metadata: AttentionMetadata, scoring: Scoring
) -> torch.Tensor:
    """See `pagemill.kernels.dispatch.paged_attention`. Two kernels: one that did both would pipeline neither."""
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
