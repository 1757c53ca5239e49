"""The buffers that the layers of a step share: its batch and intermediate results."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from pagemill.kernels.cpu.attention.sharing import sharing_of
from pagemill.kernels.cpu.layer.layer import ADDRESS, LayerWeights
from pagemill.kernels.cpu.matmul.work_sharing import BLOCK_ROWS
from pagemill.kernels.types.metadata import AttentionMetadata

STEP = np.dtype(
    [
        *((name, ADDRESS) for name in ("slot_mapping", "block_tables", "query_start_loc", "seq_lens")),
        ("sharing", ADDRESS),
        *((name, np.int64) for name in ("block_table_stride", "num_rows", "num_decode_rows", "num_tokens")),
        *((name, np.int64) for name in ("num_padded", "num_read")),
        *((name, ADDRESS) for name in ("normed", "qkv", "attended", "gated", "read_tokens")),
    ]
)


class StepBuffers:
    """The state that all layers share within a step: the metadata's addresses, and memory for results.

    Grows to the largest step so far. Not thread-safe.
    """

    def __init__(self) -> None:
        self.records = np.zeros(1, STEP)
        """One record per group of layers."""
        self._metadata: AttentionMetadata | None = None
        self._tensors: dict[str, torch.Tensor] = {}
        self._widths = dict.fromkeys(("normed", "qkv", "attended", "gated"), 0)

    def fit(self, weights: LayerWeights) -> None:
        """Make rows wide enough for this layer's results."""
        size, attended = len(weights.input_norm), weights.num_heads * weights.head_dim
        qkv = attended + 2 * weights.num_kv_heads * weights.head_dim
        for name, width in (
            ("normed", max(size, attended)),
            ("qkv", max(size, qkv)),
            ("attended", attended),
            ("gated", weights.intermediate_size),
        ):
            self._widths[name] = max(self._widths[name], width)

    def begin(self, metadata: AttentionMetadata, num_tokens: int) -> None:
        """Store the addresses of a step's tensors; does nothing if they are already stored."""
        # One block of rows per thread, or all rows if there are fewer.
        self._reserve("gated", torch.get_num_threads() * min(num_tokens, BLOCK_ROWS))
        if self._metadata is metadata:
            return
        groups = (metadata, *metadata.others)
        if len(self.records) < len(groups):
            self.records = np.zeros(len(groups), STEP)
            for name in self._tensors:
                self._point(name)
        for record, group in zip(self.records, groups, strict=False):
            _describe(record, group, num_tokens)
        for name in ("normed", "qkv", "attended"):
            self._reserve(name, num_tokens)
        self._metadata = metadata

    def read(self, num_tokens: int, tokens: torch.Tensor | None) -> None:
        """Set the tokens whose output is read: all `num_tokens`, or these, which the caller keeps alive until then."""
        assert tokens is None or (tokens.dtype == torch.int64 and tokens.is_contiguous())
        self.records["num_read"] = num_tokens if tokens is None else len(tokens)
        self.records["read_tokens"] = 0 if tokens is None else tokens.data_ptr()

    def _reserve(self, name: str, num_rows: int) -> None:
        count, tensor = num_rows * self._widths[name], self._tensors.get(name)
        if tensor is None or len(tensor) < count:
            self._tensors[name] = torch.empty(count)
            self._point(name)

    def _point(self, name: str) -> None:
        self.records[name] = self._tensors[name].data_ptr()


def _describe(step: Any, metadata: AttentionMetadata, num_tokens: int) -> None:
    tables = metadata.block_tables
    assert tables.stride(1) == 1
    assert tables.dtype == metadata.query_start_loc.dtype == metadata.seq_lens.dtype == torch.int32
    assert metadata.slot_mapping.dtype == torch.int64
    step["slot_mapping"], step["block_tables"] = metadata.slot_mapping.data_ptr(), tables.data_ptr()
    step["query_start_loc"] = metadata.query_start_loc.data_ptr()
    step["seq_lens"] = metadata.seq_lens.data_ptr()
    step["block_table_stride"] = tables.stride(0)
    step["num_rows"], step["num_decode_rows"] = len(metadata.seq_lens_host), metadata.num_decode_rows
    step["num_tokens"], step["num_padded"] = num_tokens, num_tokens - sum(metadata.query_lens_host)
    step["sharing"] = sharing_of(metadata)
