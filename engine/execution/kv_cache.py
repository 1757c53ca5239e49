"""The KV cache's tensors: how many blocks fit, and their allocation."""

from __future__ import annotations

from dataclasses import dataclass

import psutil
import torch

from engine.config import EngineConfig
from engine.errors import ConfigError
from kernels import dispatch

GIB = 1024**3
# On a CPU the cache shares its memory with everything else on the machine.
_CPU_SHARE = 0.25
_CPU_MAX_BYTES = 4 * GIB


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
        slot = self.num_layers * 2 * self.num_kv_heads * self.head_dim * self.dtype.itemsize
        return slot * self.block_size


class KVCache:
    """Keys and values apart, per layer: [num_blocks, num_kv_heads, block_size, head_dim]."""

    def __init__(self, shape: KVCacheShape, num_blocks: int, device: torch.device) -> None:
        size = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        # Zeroed, not empty: on Linux fresh zero pages cost nothing until they are touched.
        self.keys = [self._allocate(size, shape.dtype, device) for _ in range(shape.num_layers)]
        self.values = [self._allocate(size, shape.dtype, device) for _ in range(shape.num_layers)]

    @staticmethod
    def _allocate(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.zeros(size, dtype=dtype, device=device)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for keys, values in zip(self.keys, self.values, strict=True):
            dispatch.copy_blocks(keys, values, pairs)


def num_blocks_for(config: EngineConfig, shape: KVCacheShape, device: torch.device) -> int:
    """Blocks in the pool, the null block included.

    Raises:
        ConfigError: the memory given or found holds fewer than two blocks.
    """
    if config.num_kv_blocks is not None:
        return config.num_kv_blocks
    budget = config.kv_cache_memory_bytes or _free_bytes(config, device)
    num_blocks = budget // shape.block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"{budget} bytes hold {num_blocks} KV blocks of {shape.block_bytes} bytes; at least 2 are needed: "
            "raise kv_cache_memory_bytes or lower block_size"
        )
    return num_blocks


def _free_bytes(config: EngineConfig, device: torch.device) -> int:
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        return max(0, int(free - (1.0 - config.gpu_memory_utilization) * total))
    return min(_CPU_MAX_BYTES, int(psutil.virtual_memory().available * _CPU_SHARE))
