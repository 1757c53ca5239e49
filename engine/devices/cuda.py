"""A CUDA device: Pagemill's Triton kernels, cuBLAS for matmuls, NCCL between several devices."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from pagemill.engine.config import EngineConfig, StepDefaults
from pagemill.engine.devices.backend import (
    NO_BATCH_INVARIANCE,
    DeviceBackend,
    DeviceEvent,
    HostCopy,
    packed,
    unpacked,
)
from pagemill.engine.devices.quantized_products import cuda_product, rounded_product
from pagemill.engine.errors import ConfigError
from pagemill.engine.layers.cuda_fusion import CudaFusion
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.experts.products import TorchGroupedProduct
from pagemill.engine.layers.fusion import Fusion
from pagemill.engine.layers.linear import LinearOptions, MakeProduct
from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight

logger = logging.getLogger(__name__)

_LEAST_CAPABILITY = (8, 0)
_FP8_CAPABILITY = (8, 9)
_NUMBERS = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By `EngineConfig.quantization`."""


class CudaBackend(DeviceBackend):
    device = torch.device("cuda")
    step_defaults = StepDefaults(max_num_seqs=256, max_num_batched_tokens=8192, overlapped=True)
    is_apart = captures_graphs = draws_on_device = rehearses = True
    # A tile of 576 values per head is padded to 1024, and exceeds a multiprocessor's shared memory.
    caches_latents = False
    int8_scale_span = "row of all inputs"

    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        if config.batch_invariant:
            raise ConfigError(NO_BATCH_INVARIANCE)
        if config.matmul != "auto":
            raise ConfigError(
                f"matmul={config.matmul!r} is only supported on a CPU; on a GPU leave it at auto",
                setting="matmul",
            )
        if (size := config.tensor_parallel_size) > (found := torch.cuda.device_count()):
            raise ConfigError(f"tensor_parallel_size={size} takes as many GPUs; torch finds {found}")
        if size > 1 and config.quantization is not None:
            raise ConfigError(
                f"quantization={config.quantization!r} with tensor_parallel_size={size} is not supported on a GPU: a "
                "scale spans a token's activations, of which a rank sees a part; use a quantized checkpoint "
                "(docs/quantization.md)",
                setting="quantization",
            )
        if (capability := self._capability()) < _LEAST_CAPABILITY:
            raise ConfigError(
                f"a GPU of compute capability {capability[0]}.{capability[1]} is not supported: the kernels need 8.0 "
                "or newer; use device=cpu",
                setting="device",
            )
        if config.quantization == "fp8" and not self._has_float8():
            raise ConfigError(
                "quantization='fp8' needs a GPU of compute capability 8.9 or newer; use int8",
                setting="quantization",
            )
        is_fp8 = config.kv_cache_dtype == "fp8"
        if is_fp8 and not self._has_float8():
            raise ConfigError(
                "kv_cache_dtype='fp8' needs a GPU of compute capability 8.9 or newer; int8 takes as little memory"
            )

        self._check_attention(config.attention_backend)
        if dtype is torch.float32 and config.dtype == "auto":
            logger.warning(
                "the checkpoint is in float32, which a GPU computes slowly: dtype=bfloat16 is faster"
            )

    def _check_attention(self, name: str) -> None:
        from pagemill.kernels.gpu.attention import LIBRARIES  # imports triton
        from pagemill.kernels.gpu.attention_backend import Unavailable

        if name in LIBRARIES:
            try:
                LIBRARIES[name].require(self.device)
            except Unavailable as error:
                raise ConfigError(
                    f"attention_backend={name!r}: {error}", setting="attention_backend"
                ) from error

    def default_dtype(self, declared: torch.dtype | None, *, is_quantized: bool) -> torch.dtype:
        return declared or torch.bfloat16

    def product(
        self, weights: Sequence[Weight], bias: torch.Tensor | None, options: LinearOptions
    ) -> nn.Module | None:
        if options.quantization is not None:
            return rounded_product(weights, bias, self.device, _NUMBERS[options.quantization])
        if any(isinstance(weight, QuantizedWeight) for weight in weights):
            return cuda_product(weights, bias, self.device, has_float8=self._has_float8())
        return None

    def grouped_product(self, matrices: ExpertMatrices, options: LinearOptions) -> nn.Module:
        if options.quantization is not None:
            raise ConfigError(
                f"quantization={options.quantization!r} of a mixture of experts is not supported on a GPU, which has "
                "no kernel for experts' 8-bit numbers",
                setting="quantization",
            )
        if TorchGroupedProduct.supports(matrices, self._capability):
            return TorchGroupedProduct(matrices, self.device)
        return super().grouped_product(matrices, options)

    def quantized_activations(self) -> str:
        return (
            "float8, a factor per row, with float8 weights per output"
            if self._has_float8()
            else "not rounded"
        )

    def _has_float8(self) -> bool:
        return self._capability() >= _FP8_CAPABILITY

    def _capability(self) -> tuple[int, int]:
        return torch.cuda.get_device_capability(self.device)

    def fusion(self, traits: DecoderTraits, dtype: torch.dtype, make_product: MakeProduct) -> Fusion | None:
        return CudaFusion(traits, make_product)

    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        return torch.zeros(like.shape, dtype=like.dtype, device=self.device)

    def total_bytes(self) -> int:
        return int(torch.cuda.mem_get_info(self.device)[1])

    def peak_bytes(self, run: Callable[[], None]) -> int:
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        run()
        torch.cuda.synchronize(self.device)
        return int(torch.cuda.max_memory_allocated(self.device)) - before

    def free_bytes(self, config: EngineConfig) -> int:
        torch.cuda.empty_cache()  # counts memory released by loading as free
        free, total = torch.cuda.mem_get_info(self.device)
        return max(0, int(free - (1.0 - config.gpu_memory_utilization) * total))

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        flat = packed(tensors)
        host = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        host.copy_(flat, non_blocking=True)
        return HostCopy(unpacked(host, tensors), self.mark())

    def mark(self) -> DeviceEvent:
        mark: Any = torch.cuda.Event()  # type: ignore[no-untyped-call]
        mark.record()
        return mark  # type: ignore[no-any-return]

    def is_alive(self) -> bool:
        try:
            torch.cuda.synchronize(self.device)
            return torch.ones(1, device=self.device).add(1).item() == 2
        except torch.OutOfMemoryError:
            return True
        except RuntimeError:  # `torch.AcceleratorError`, and what older calls raise
            return False

    def claim(self, rank: int) -> None:
        """Select this rank's GPU, also on rank 0: with a GPU chosen by the program, two ranks might share one."""
        torch.cuda.set_device(rank)

    def collectives(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = timeout
        group: Any = dist.ProcessGroupNCCL(store, rank, size, options)
        # NCCL connects in its first collective: do it now, not during a request.
        group.allreduce([meeting := torch.zeros(1, device=self.device)]).wait()
        meeting.item()
        return group
