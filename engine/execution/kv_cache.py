"""The KV cache's tensors: number of blocks and allocation."""

from __future__ import annotations

import logging
from bisect import bisect_right
from dataclasses import replace

import psutil
import torch

from pagemill.engine.config import MAX_KV_BLOCKS, EngineConfig, SchedulerConfig
from pagemill.engine.devices.adapter_memory import reserved_bytes
from pagemill.engine.devices.backend import DeviceBackend
from pagemill.engine.errors import ConfigError
from pagemill.engine.execution.host_cache import HostCache
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.plan import StepPlan
from pagemill.kernels import dispatch
from pagemill.kernels.types.layer_cache import FP8, LayerCache, allocate_layer

logger = logging.getLogger(__name__)

GIB = 1024**3
MAX_COPIED_BYTES = 256 * 1024**2
"""Bytes that a step copies to the host tier: about 10 ms over PCIe, less than a decode step of most models."""


class KVCache:
    """The pool's tensors, and each layer's view of them."""

    def __init__(
        self,
        shape: KVCacheShape,
        num_blocks: int,
        device: DeviceBackend,
        num_host_blocks: int = 0,
        attention: str = "auto",
    ) -> None:
        """`attention`: `EngineConfig.attention_backend`."""
        layout = replace(_layout(shape, num_blocks), attention=attention)
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
        """Execute a plan's copies, in its order."""
        if plan.host_stores or plan.host_loads:
            assert self._host is not None, "a plan uses a host tier that does not exist"
            if plan.host_stores:
                self._host.store(plan.host_stores)
            if plan.host_loads:
                self._host.load(plan.host_loads)
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
    config: EngineConfig,
    shape: KVCacheShape,
    device: DeviceBackend,
    step_bytes: int = 0,
    limits: SchedulerConfig | None = None,
) -> int:
    """Return the number of blocks in the pool, including the null block.

    Args:
        step_bytes: free memory that a step needs.
        limits: those of a model with a state per sequence, which uses a part of the cache's memory.

    Raises:
        ConfigError: the configured or available memory holds fewer than two blocks, or fewer than configured.
    """
    num_blocks = config.num_kv_blocks
    if num_blocks is None and limits is not None and not shape.num_layers:  # no data is stored per token
        num_blocks = 1 + limits.max_num_seqs * -(-limits.max_model_len // shape.block_size)
        num_blocks = max(2, min(MAX_KV_BLOCKS, num_blocks))
    if num_blocks is None:
        taken = reserved_bytes(config, device) + step_bytes
        budget = config.kv_cache_memory_bytes or device.free_bytes(config) - taken
        slots = 0 if limits is None else limits.max_num_seqs + limits.num_cached_states
        states = 0 if limits is None else slots * limits.state_bytes
        budget = max(0, budget - states)
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


def _layout(shape: KVCacheShape, num_blocks: int) -> LayerCache:
    """Return a layer's tensors without memory."""
    sizes = (num_blocks, shape.num_kv_heads, shape.block_size, shape.head_dim)
    layout = allocate_layer(*sizes, shape.dtype, torch.device("meta"))
    return layout if shape.latent is None else layout.sharing_values()


def host_bytes(shape: KVCacheShape, num_blocks: int, device: DeviceBackend) -> int:
    """Return the memory of a host tier, in bytes. torch rounds each pinned tensor up to a power of two."""
    if not device.is_apart or not num_blocks:
        return num_blocks * shape.block_bytes
    sizes = (num_blocks * tensor.nbytes for tensor in _layout(shape, 1).tensors())
    return shape.pool_layers * sum(1 << (size - 1).bit_length() for size in sizes)


def num_host_blocks_for(config: EngineConfig, shape: KVCacheShape, device: DeviceBackend) -> int:
    """Return the number of blocks of the host tier, which uses up to `host_cache_gib` of memory.

    Raises:
        ConfigError: the memory is not available, or cannot hold a block, or the prefix cache is disabled.
    """
    num_bytes = int(config.host_cache_gib * GIB)
    if not num_bytes:
        return 0
    if not config.enable_prefix_caching:
        raise ConfigError("host_cache_gib: requires enable_prefix_caching", setting="host_cache_gib")
    available = psutil.virtual_memory().available
    if num_bytes > available:
        raise ConfigError(
            f"host_cache_gib {config.host_cache_gib:g} is more than the {available / GIB:.1f} GiB available"
        )
    own_bytes = num_bytes // config.tensor_parallel_size  # the ranks share the machine's memory
    counts = range(1, 1 + own_bytes // shape.block_bytes)
    num_blocks = bisect_right(counts, own_bytes, key=lambda count: host_bytes(shape, count, device))
    if not num_blocks:
        raise ConfigError(
            f"host_cache_gib {config.host_cache_gib:g} holds no KV block of "
            f"{host_bytes(shape, 1, device) * config.tensor_parallel_size} bytes"
        )
    if device.is_apart:
        pinned = host_bytes(shape, num_blocks, device) / GIB
        logger.info("host tier: %d KV blocks, %.2f GiB of pinned memory", num_blocks, pinned)
    return num_blocks
