"""The pool's tensors on the CPU: zeros, and no memory until the first write."""

from __future__ import annotations

import psutil
import pytest
import torch

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.execution.kv_cache import KVCache, num_host_blocks_for
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.kernels.types.layer_cache import FP8

MIB = 2**20
CPU = torch.device("cpu")


def _resident_bytes() -> int:
    resident: int = psutil.Process().memory_info().rss
    return resident


def test_a_pool_takes_no_memory_before_it_is_written() -> None:
    shape = KVCacheShape(num_layers=2, num_kv_heads=2, head_dim=64, block_size=16, dtype=torch.float32)
    KVCache(shape, num_blocks=2, device=CpuBackend())  # imports modules that the next one needs
    before = _resident_bytes()
    cache = KVCache(shape, num_blocks=256 * MIB // shape.block_bytes, device=CpuBackend())
    assert _resident_bytes() - before < 32 * MIB
    for layer in cache.layers:
        layer.keys.fill_(1.0)
    assert _resident_bytes() - before > 100 * MIB
    del cache, layer
    assert _resident_bytes() - before < 64 * MIB, "the memory has to go with the tensors"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, FP8], ids=str)
def test_a_pool_is_zeros_in_the_layout_that_kernels_expect(dtype: torch.dtype) -> None:
    shape = KVCacheShape(num_layers=3, num_kv_heads=2, head_dim=8, block_size=4, dtype=dtype)
    cache = KVCache(shape, num_blocks=5, device=CpuBackend())
    assert len(cache.layers) == 3
    for layer in cache.layers:
        assert layer.keys.shape == layer.values.shape == (5, 2, 4, 8)
        assert layer.keys.dtype is layer.values.dtype is dtype
        assert layer.is_scaled == (dtype in (torch.int8, FP8))
        for tensor in layer.tensors():
            assert tensor.device == CPU
            assert tensor.is_contiguous()
            assert not tensor.float().any()
    layer.keys.view(torch.uint8).fill_(1)
    assert not layer.values.float().any(), "keys and values share no memory"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_pinned_tensors_of_the_host_tier_count_as_torch_rounds_them(dtype: torch.dtype) -> None:
    """Up to a power of two each: out of 1 GiB, tensors of 24 MiB would take 1.33 GiB."""
    shape = KVCacheShape(num_layers=21, num_kv_heads=2, head_dim=64, block_size=16, dtype=dtype)
    config = EngineConfig(model="echo", host_cache_gib=1.0)
    unrounded = num_host_blocks_for(config, shape, CpuBackend())
    assert unrounded == 2**30 // shape.block_bytes
    num_blocks = num_host_blocks_for(config, shape, CudaBackend())
    vector = 2 * 16  # of a block, by the tensor
    sizes = [64 * vector * dtype.itemsize] * 42 + [4 * vector] * (42 if dtype is torch.int8 else 0)

    def taken(count: int) -> int:
        return sum(2 ** (count * size - 1).bit_length() for size in sizes)

    assert taken(num_blocks) <= 2**30 < taken(num_blocks + 1)
    assert taken(unrounded) > 2**30
