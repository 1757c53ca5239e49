"""The CPU: Pagemill's kernels for fp32 activations, oneDNN and torch for the rest."""

from __future__ import annotations

import importlib.util
import logging
import mmap
import time
from collections.abc import Sequence
from datetime import timedelta
from functools import cache, partial
from typing import Any, get_args

import psutil
import torch
import torch.distributed as dist
from torch import nn

from pagemill.engine.config import EngineConfig
from pagemill.engine.devices import matmul_choice
from pagemill.engine.devices.backend import NO_BATCH_INVARIANCE, DeviceBackend
from pagemill.engine.devices.quantized_products import packed_product
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.converted_products import ConvertedProduct, PackedBf16Product, PackedInt8Product
from pagemill.engine.layers.cpu_fusion import CpuFusion, RotaryAttention
from pagemill.engine.layers.decoder_layer import FusedDecoderLayer
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.experts.products import PackedGroupedProduct, PlainInt8Experts
from pagemill.engine.layers.fusion import Fusion
from pagemill.engine.layers.int8_products import PlainInt8Product
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import LinearOptions, MakeProduct, Matmul, OneDNNProduct, PackedProduct
from pagemill.engine.layers.quantized_weight import Weight, dense
from pagemill.kernels import grouped_int8

logger = logging.getLogger(__name__)

# The rest of the machine shares this memory.
_POOL_SHARE = 0.25
_POOL_MAX_BYTES = 4 * 1024**3
_LOOPBACK = "127.0.0.1"


def _has_numba() -> bool:
    return importlib.util.find_spec("numba") is not None


@cache
def _has_own_products() -> bool:
    if not _has_numba():
        return False
    from pagemill.kernels.cpu.matmul import fp32

    return fp32.is_supported()


@cache
def _has_bf16_products() -> bool:
    if not _has_numba():
        return False
    from pagemill.kernels.cpu.matmul import bf16

    return bf16.is_native()


@cache
def _has_amx() -> bool:
    from pagemill.kernels.cpu.matmul import amx_tile

    return amx_tile.IS_NATIVE


@cache
def _has_fast_int8_products() -> bool:
    if not _has_numba():
        return False
    from pagemill.kernels.cpu.matmul import int8_tile

    return int8_tile.PRODUCTS is not int8_tile.SHIFTED


def _multiplies_bf16(dtype: torch.dtype | None) -> bool:
    return dtype is torch.bfloat16 and _has_bf16_products()


def _rounded(weight: Weight, dtype: torch.dtype | None) -> Weight:
    """Return a weight rounded to the model's dtype, in fp32. Quantized checkpoints' weights remain unchanged."""
    return weight.to(dtype).float() if isinstance(weight, torch.Tensor) and dtype is not None else weight


class CpuBackend(DeviceBackend):
    device = torch.device("cpu")
    int8_input_group = grouped_int8.GROUP

    @property
    def int8_scale_span(self) -> str:
        span = f"{self.int8_input_group} inputs"
        if not _has_numba():  # torch's matmul rounds weights that already were integers
            return span
        attention = "; prompts' attention in bfloat16" if _has_bf16_products() else ""
        return f"{span}; a file's own integers, their shortest scale{attention}"

    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        if config.batch_invariant and not (self.has_kernels(dtype) and torch._C._has_mkldnn):
            raise ConfigError(NO_BATCH_INVARIANCE)
        if self.module_dtype(dtype) is not torch.float32:
            name = str(dtype).removeprefix("torch.")
            logger.warning("torch emulates %s on this CPU, slowly: dtype=float32 is faster", name)
        if config.quantization == "int8" and not _has_fast_int8_products():
            logger.warning("int8 may be slower than float32 on this CPU, which does not have AVX2")
        if config.quantization == "fp8":
            raise ConfigError(
                "quantization='fp8' needs a GPU that multiplies such numbers; on a CPU use int8",
                setting="quantization",
            )
        self._check_matmul(config)
        if (name := config.attention_backend) != "auto":
            raise ConfigError(
                f"attention_backend={name!r} requires a GPU; on a CPU leave it at auto",
                setting="attention_backend",
            )

    def _check_matmul(self, config: EngineConfig) -> None:
        if config.matmul == "own" and not _has_own_products():
            raise ConfigError(
                "matmul='own' needs numba and a CPU with AVX2 or AVX-512; leave it at auto", setting="matmul"
            )
        if config.matmul != "onednn":
            return
        if not torch._C._has_mkldnn:
            raise ConfigError("matmul='onednn' needs a torch with oneDNN; use own", setting="matmul")
        for name in ("quantization", "batch_invariant"):
            if value := getattr(config, name):
                raise ConfigError(f"matmul='onednn' with {name}={value!r} is not supported", setting="matmul")

    def choose_matmul(
        self, config: EngineConfig, module: nn.Module, dtype: torch.dtype, *, is_quantized: bool = False
    ) -> Matmul:
        if config.matmul != "auto":
            return config.matmul
        # Ranks must agree, and the other settings need Pagemill's kernels.
        is_fixed = config.quantization or config.batch_invariant or config.tensor_parallel_size > 1
        cpu = matmul_choice.cpu_name()
        if (
            is_quantized
            or is_fixed
            or not (_has_own_products() and torch._C._has_mkldnn)
            or matmul_choice.is_measured(cpu)
        ):
            return "own"
        from pagemill.kernels.cpu.jit.kernel import directory

        def make(name: Matmul, weight: torch.Tensor) -> nn.Module:
            product = self.product([weight], None, LinearOptions(dtype=dtype, matmul=name))
            assert product is not None
            return product

        products: matmul_choice.Products = {name: partial(make, name) for name in get_args(Matmul)}
        kind = f"{cpu} {dtype} {torch.__version__} {torch.get_num_threads()}"
        return matmul_choice.choose(matmul_choice.decoder_shapes(module), products, kind, directory())

    def default_dtype(self, declared: torch.dtype | None, *, is_quantized: bool) -> torch.dtype:
        # Half precision is emulated if the CPU does not support it, slower and less exact; and weights
        # of other formats would be rounded.
        is_fast = declared is torch.bfloat16 and not is_quantized and _has_bf16_products()
        return torch.bfloat16 if is_fast else torch.float32

    def module_dtype(self, dtype: torch.dtype) -> torch.dtype:
        # Pagemill's kernels store weights in 16 bits even without such instructions, and multiply in fp32.
        return torch.float32 if _multiplies_bf16(dtype) or _has_own_products() else dtype

    def numbers(self, dtype: torch.dtype) -> str:
        if self.module_dtype(dtype) is dtype:
            return super().numbers(dtype)
        if _multiplies_bf16(dtype):
            return f"{dtype} products{' by AMX' if _has_amx() else ''}, float32 sums and activations"
        return f"{dtype} weights, float32 products"

    def has_kernels(self, dtype: torch.dtype) -> bool:
        """Return True if the JIT-compiled operators support such a model: they require fp32 activations."""
        return self.module_dtype(dtype) is torch.float32 and _has_numba()

    def product(
        self, weights: Sequence[Weight], bias: torch.Tensor | None, options: LinearOptions
    ) -> nn.Module | None:
        if options.quantization == "int8":
            return (PackedInt8Product if _has_numba() else PlainInt8Product)(dense(weights), bias)
        if weights[0].dtype is not torch.float32 or not torch._C._has_mkldnn:
            return None
        if options.matmul == "onednn":
            weight = dense([_rounded(weight, options.dtype) for weight in weights])
            weight = weight.bfloat16() if _multiplies_bf16(options.dtype) else weight
            return OneDNNProduct(weight, bias, row_invariant=True)
        if _multiplies_bf16(options.dtype):
            return PackedBf16Product(dense(weights), bias)
        if _has_own_products():
            return packed_product([_rounded(weight, options.dtype) for weight in weights], bias)
        return OneDNNProduct(dense(weights), bias, row_invariant=options.row_invariant)

    def grouped_product(self, matrices: ExpertMatrices, options: LinearOptions) -> nn.Module:
        if options.quantization == "int8":
            return PackedGroupedProduct(matrices, "int8") if _has_numba() else PlainInt8Experts(matrices)
        if matrices.dtype is torch.float32 and _multiplies_bf16(options.dtype):
            return PackedGroupedProduct(matrices, "bf16")
        if matrices.dtype is torch.float32 and _has_own_products():
            return PackedGroupedProduct(matrices.rounded(options.dtype), "fp32")
        return super().grouped_product(matrices, options)

    def fusion(self, traits: DecoderTraits, dtype: torch.dtype, make_product: MakeProduct) -> Fusion | None:
        return CpuFusion(traits, make_product) if self.has_kernels(dtype) else None

    def warm_up(self, module: nn.Module, dtype: torch.dtype, num_heads: int, shape: KVCacheShape) -> None:
        """Compile the operators, or load them from disk."""
        if self.has_kernels(dtype):
            _warm_up_kernels(module, num_heads, shape)
        else:
            _warm_up_products(module)

    def warm_up_adapters(self) -> None:
        if _has_numba():
            from pagemill.kernels.cpu.matmul import low_rank

            low_rank.warm_up()

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate separately mapped memory, none of which is touched before it is written.

        `torch.zeros` writes its zeros, two thirds of a second per GiB at startup, and allocates small
        pages, for which it is too late to request huge ones.
        """
        memory = mmap.mmap(-1, like.nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        # The tensor references the mapping.
        tensor = torch.frombuffer(memory, dtype=torch.uint8).view(like.dtype).view(like.shape)
        if _has_numba():
            from pagemill.kernels.cpu.operators import advise_huge_pages

            advise_huge_pages(tensor)
        return tensor

    def total_bytes(self) -> int:
        return int(psutil.virtual_memory().total)

    def free_bytes(self, config: EngineConfig) -> int:
        available = int(psutil.virtual_memory().available * _POOL_SHARE)
        return min(_POOL_MAX_BYTES, available) // config.tensor_parallel_size

    def collectives(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        # On the loopback device: by default gloo resolves the machine's name, which may fail, and would
        # listen on that address.
        settings: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        settings._devices = [dist.ProcessGroupGloo.create_device(hostname=_LOOPBACK)]
        settings._timeout = timeout
        return dist.ProcessGroupGloo(store, rank, size, settings)


def _warm_up_kernels(module: nn.Module, num_heads: int, shape: KVCacheShape) -> None:
    from pagemill.kernels.cpu import operators as cpu
    from pagemill.kernels.cpu.jit.progress import report_compiling
    from pagemill.kernels.cpu.layer.compile_ahead import compile_apart

    layer = next((part for part in module.modules() if isinstance(part, FusedDecoderLayer)), None)

    def warm_up_operators() -> None:
        _warm_up_products(module)
        cpu.warm_up()

    started = time.monotonic()
    logger.info("loading the CPU kernels; the first time they are compiled, in about 10 s on two cores")
    with report_compiling(_log_compiling):
        if layer is not None:
            compile_apart(layer.parts(shape.dtype), meanwhile=warm_up_operators)
            layer.warm_up(shape.block_size, shape.dtype)
        else:
            warm_up_operators()
            rounds = any(
                isinstance(m, RotaryAttention) and m.scoring.rounds_to_cache for m in module.modules()
            )
            heads = (num_heads, shape.num_kv_heads, shape.head_dim)
            cpu.warm_up_layers(*heads, shape.block_size, shape.dtype, rounds_to_cache=rounds)
    logger.info("CPU kernels ready after %.1f s", time.monotonic() - started)


def _warm_up_products(module: nn.Module) -> None:
    parts = list(module.modules())
    for kernel in {part.kernel() for part in parts if isinstance(part, PackedProduct | ConvertedProduct)}:
        kernel.warm_up()
    for part in parts:
        if isinstance(part, PackedGroupedProduct):
            part.warm_up()


def _log_compiling(count: int, seconds: float) -> None:
    logger.info("compiling the CPU kernels: %d compiled after %.0f s", count, seconds)
