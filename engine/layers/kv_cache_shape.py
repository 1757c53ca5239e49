"""The shape of a block of a model's KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from pagemill.kernels.types.layer_cache import largest_number


@dataclass(frozen=True, slots=True)
class KVCacheShape:
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    dtype: torch.dtype

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all layers, keys and values."""
        scale_bytes = 0 if largest_number(self.dtype) is None else torch.float32.itemsize
        head = self.head_dim * self.dtype.itemsize + scale_bytes
        return self.num_layers * 2 * self.num_kv_heads * self.block_size * head
