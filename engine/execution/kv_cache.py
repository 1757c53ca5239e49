"""The KV cache's tensors: their number of blocks and their allocation."""

from __future__ import annotations

from dataclasses import replace

import psutil
import torch

from pagemill.engine.config import MAX_KV_BLOCKS, EngineConfig
from pagemill.engine.devices.adapter_memory import reserved_bytes
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.host_cache import HostCache
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.plan import StepPlan
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import FP8, allocate_layer

GIB = 1024**3


class KVCache:
    """The pool's tensors, and each layer's view of them."""

    def __init__(
        self, shape: KVCacheShape, num_blocks: int, device: DeviceBackend, num_host_blocks: int = 0
    ) -> None:
        sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
        layout = allocate_layer(*sizes, shape.dtype, torch.device("meta"))
        if shape.latent is not None:
            layout = layout.sharing_values()
        self._pool = [layout.converted(device.zeros) for _ in range(shape.pool_layers)]
        self.layers = list(self._pool)
        """The cache of each layer of the model. The n-th layers of all groups share tensors."""
        if shape.groups:
            views = {
                layer: replace(tensors, group=number, window=group.window)
                for number, group in enumerate(shape.groups)
                for layer, tensors in zip(group.layers, self._pool, strict=False)
            }
            self.layers = [views[layer] for layer in range(shape.num_layers)]
        self._host = HostCache(self._pool, num_host_blocks, device) if num_host_blocks else None

    def move_blocks(self, plan: StepPlan) -> None:
        """Execute a plan's swaps and copies, in its order."""
        if plan.swap_out or plan.swap_in:
            assert self._host is not None, "a plan swaps without swap space"
            if plan.swap_out:
                self._host.swap_out(plan.swap_out)
            if plan.swap_in:
                self._host.swap_in(plan.swap_in)
        if plan.block_copies:
            self.copy_blocks(plan.block_copies)

    def copy_blocks(self, pairs: list[tuple[int, int]]) -> None:
        for layer in self._pool:
            dispatch.copy_blocks(layer.keys, layer.values, pairs)
            if layer.key_scales is not None and layer.value_scales is not None:
                dispatch.copy_blocks(layer.key_scales, layer.value_scales, pairs)


def resolve_cache_dtype(name: str, model_dtype: torch.dtype) -> torch.dtype:
    """Return the dtype for `EngineConfig.kv_cache_dtype`."""
    if name == "auto":
        return model_dtype
    if name != "fp8":
        dtype = getattr(torch, name)
        assert isinstance(dtype, torch.dtype)
        return dtype
    return FP8


def num_blocks_for(
    config: EngineConfig, shape: KVCacheShape, device: DeviceBackend, step_bytes: int = 0
) -> int:
    """Return the number of blocks in the pool, including the null block.

    Args:
        step_bytes: what a step takes of the free memory.

    Raises:
        ConfigError: the configured or available memory holds fewer than two blocks, or fewer than configured.
    """
    num_blocks = config.num_kv_blocks
    if num_blocks is None:
        taken = reserved_bytes(config, device) + step_bytes
        budget = max(0, config.kv_cache_memory_bytes or device.free_bytes(config) - taken)
        num_blocks = min(MAX_KV_BLOCKS, budget // shape.block_bytes)
        if num_blocks < 2:
            raise ConfigError(
                f"{budget} bytes hold {num_blocks} KV blocks of {shape.block_bytes} bytes; at least 2 are needed: "
                "raise kv_cache_memory_bytes or lower block_size"
            )
    if num_blocks * shape.block_bytes > (total := device.total_bytes()):
        raise ConfigError(
            f"{num_blocks} KV blocks of {shape.block_bytes} bytes are more than the {total / GIB:.1f} GiB "
            "of memory there are: lower num_kv_blocks or kv_cache_memory_bytes"
        )
    return num_blocks


def num_host_blocks_for(config: EngineConfig, shape: KVCacheShape) -> int:
    """Return the blocks of swap space. Raises `ConfigError`: too little memory, or a space of no block."""
    num_bytes = int(config.swap_space_gib * GIB)
    if not num_bytes:
        return 0
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(
            f"swap_space_gib {config.swap_space_gib:g} is more than the {available / GIB:.1f} GiB available"
        )
    block_bytes = shape.block_bytes * config.tensor_parallel_size  # the ranks share the machine's memory
    if num_bytes < block_bytes:
        raise ConfigError(
            f"swap_space_gib {config.swap_space_gib:g} holds no KV block of {block_bytes} bytes"
        )
    return num_bytes // block_bytes
