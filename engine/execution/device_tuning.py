"""Process-wide settings that a device runs better with, made once before the model is loaded."""

from __future__ import annotations

import ctypes
import logging
import sys
import time

import torch
from torch import nn

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer
from pagemill.engine.layers.faces import uses_cpu_kernels
from pagemill.engine.layers.int8_linear import PackedInt8Product
from pagemill.engine.layers.linear import has_packed_products
from pagemill.engine.models.kv_cache_shape import KVCacheShape

logger = logging.getLogger(__name__)

_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


def tune_device(config: EngineConfig) -> None:
    if config.num_threads is not None:
        torch.set_num_threads(config.num_threads)
    if sys.platform == "linux":
        # glibc maps every large temporary anew and faults its pages in; keeping the memory halves the cost of
        # operators that return megabytes.
        libc = ctypes.CDLL(None)
        if hasattr(libc, "mallopt"):
            libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(1 << 30))
            libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))


def require_batch_invariance(device: torch.device, dtype: torch.dtype) -> None:
    """Raises `ConfigError` where a row's numbers would depend on the rows beside it."""
    if not uses_cpu_kernels(device, dtype) or not has_packed_products(device, dtype):
        raise ConfigError(
            "batch_invariant needs device=cpu and dtype=float32, with numba and oneDNN: elsewhere the order of a "
            "product's sums depends on the number of rows"
        )


def warm_up_cpu_kernels(module: nn.Module, num_heads: int, shape: KVCacheShape) -> None:
    """Compile the operators of a fused model, or load them from the disk, before the first step needs them."""
    from pagemill.kernels.cpu import operators as cpu
    from pagemill.kernels.cpu.jit.progress import report_compiling
    from pagemill.kernels.cpu.layer.compile_ahead import compile_apart
    from pagemill.kernels.cpu.sampling import argmax as cpu_argmax

    layer = next((part for part in module.modules() if isinstance(part, FusedDecoderLayer)), None)

    def warm_up_operators() -> None:
        cpu.warm_up()
        cpu_argmax.warm_up()
        warm_up_int8_products(module)

    started = time.monotonic()
    logger.info("preparing the CPU kernels (compiled on first use, 1 to 2 minutes in all; then kept on disk)")
    with report_compiling(_log_compiling):
        if layer is not None:
            compile_apart(layer.parts(shape.dtype), meanwhile=warm_up_operators)
            layer.warm_up(shape.block_size, shape.dtype)
        else:
            warm_up_operators()
            cpu.warm_up_layers(num_heads, shape.num_kv_heads, shape.head_dim, shape.block_size, shape.dtype)
    logger.info("CPU kernels ready after %.1f s", time.monotonic() - started)


def warm_up_int8_products(module: nn.Module) -> None:
    """Compile them, or load them from the disk, where the model has such."""
    if any(isinstance(part, PackedInt8Product) for part in module.modules()):
        from pagemill.kernels.cpu.matmul import int8

        int8.warm_up()


def _log_compiling(count: int, seconds: float) -> None:
    logger.info("compiling the CPU kernels: %d compiled after %.0f s", count, seconds)
