"""The differences between devices, in one interface; a backend is chosen once, at startup."""

# ruff: noqa: B027 (an empty method is a default, not a forgotten decorator)

from __future__ import annotations

import ctypes
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pagemill.engine.config import EngineConfig, StepDefaults
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.experts.experts import replace_experts
from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.experts.products import StackedProduct
from pagemill.engine.layers.fusion import Fusion
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import LinearOptions, MakeProduct, Matmul, note_paths, replace_linears
from pagemill.engine.layers.quantized_weight import Weight

NO_BATCH_INVARIANCE = (
    "batch_invariant needs device=cpu, numba and oneDNN, and dtype=float32 or a CPU with AVX2 or AVX-512: elsewhere "
    "the order of a product's sums depends on the number of rows"
)

# Parameters of glibc's mallopt.
_M_TRIM_THRESHOLD = -1
_M_MMAP_THRESHOLD = -3


class DeviceEvent(Protocol):
    """A point in the device's work; reached when all work before it is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Reached:
    """An event of a device whose work is complete when a call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HostCopy:
    """Tensors being copied to the host. Waiting for them does not wait for later launches."""

    hosts: list[torch.Tensor]
    copied: DeviceEvent = Reached()  # noqa: RUF009 (it has no state)

    def wait(self) -> list[torch.Tensor]:
        self.copied.synchronize()
        return self.hosts


def packed(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the tensors' bytes, [num_bytes] uint8, in the order of `unpacked`."""
    return torch.cat([tensors[place].reshape(-1).view(torch.uint8) for place in _widest_first(tensors)])


def unpacked(flat: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return views of packed bytes with the shapes and dtypes of `like`."""
    places = _widest_first(like)
    parts = torch.split(flat, [like[place].nbytes for place in places])
    views = {
        place: part.view(like[place].dtype).view(like[place].shape)
        for place, part in zip(places, parts, strict=True)
    }
    return [views[place] for place in range(len(like))]


def _widest_first(tensors: Sequence[torch.Tensor]) -> list[int]:
    """Return an order in which each tensor starts at a multiple of its element size."""
    return sorted(range(len(tensors)), key=lambda place: -tensors[place].element_size())


class DeviceBackend(ABC):
    """A device. The defaults suit one that shares the host's memory and executes synchronously."""

    device: torch.device
    step_defaults = StepDefaults()
    is_apart = False
    """True for a device with separate memory: arrays are transferred in one copy per step, from pinned pages."""
    captures_graphs = False
    """True if decode steps are recorded once and replayed."""
    draws_on_device = False
    """True if `pagemill.kernels.dispatch.sample_tokens` draws random rows, which neither sorts nor waits."""
    rehearses = False
    """True if the largest steps run at startup, to measure their memory and to compile their kernels."""
    caches_latents = True
    """True if its attention kernels support latent attention's cache; False: keys and values are cached instead."""
    int8_input_group = 1
    """Number of inputs that share a scale in int8 matmuls, if fixed."""

    @property
    @abstractmethod
    def int8_scale_span(self) -> str:
        """The extent of one scale in int8 matmuls, and other settings that determine their results."""

    def tune_process(self, num_threads: int | None) -> None:
        """Apply process-wide settings, before the model is loaded."""
        if num_threads is not None:
            torch.set_num_threads(num_threads)
        if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
            # glibc maps every large temporary again and faults its pages in; retaining the memory halves the cost
            # of operators that return megabytes.
            libc.mallopt(_M_MMAP_THRESHOLD, ctypes.c_int(1 << 30))
            libc.mallopt(_M_TRIM_THRESHOLD, ctypes.c_int(2**31 - 1))

    @abstractmethod
    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for settings that are not supported with this dtype on the device."""

    @abstractmethod
    def default_dtype(self, declared: torch.dtype | None, *, is_quantized: bool) -> torch.dtype:
        """Return the dtype for `dtype="auto"`, which only depends on device and checkpoint.

        Args:
            declared: the dtype in the checkpoint's config.json.
            is_quantized: the checkpoint's weights are quantized, or `quantization` is set.
        """

    def module_dtype(self, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of a model's tensors and activations, except in matmuls."""
        return dtype

    def numbers(self, dtype: torch.dtype) -> str:
        """Return the arithmetic for a model of this dtype, for the fingerprint."""
        return str(dtype)

    def choose_matmul(
        self, config: EngineConfig, module: nn.Module, dtype: torch.dtype, *, is_quantized: bool = False
    ) -> Matmul:
        """Return whose kernels multiply by a model's weights, before its modules are rewritten.

        Args:
            is_quantized: the checkpoint is, and only `config.matmul` can widen its weights for oneDNN.
        """
        return "own"

    @abstractmethod
    def product(
        self, weights: Sequence[Weight], bias: torch.Tensor | None, options: LinearOptions
    ) -> nn.Module | None:
        """Return the best matmul for these weights, as defined by `MakeProduct`."""

    def grouped_product(self, matrices: ExpertMatrices, options: LinearOptions) -> nn.Module:
        """Return the best matmul for experts' weights, as defined by `pagemill.engine.layers.experts.products`."""
        return StackedProduct(matrices, self.device)

    def quantized_activations(self) -> str:
        """Return the row rounding of matmuls with a quantized checkpoint's weights, for the fingerprint."""
        return "not rounded"

    @abstractmethod
    def fusion(self, traits: DecoderTraits, dtype: torch.dtype, make_product: MakeProduct) -> Fusion | None:
        """Return the rewriter of a decoder; None: its modules remain unchanged."""

    def fuse(
        self, module: Any, traits: DecoderTraits | None, dtype: torch.dtype, linear: LinearOptions
    ) -> None:
        """Rewrite the known modules of a causal language model, and its linear layers."""
        note_paths(module)
        make_product = partial(self.product, options=linear)
        exact = partial(self.product, options=replace(linear, quantization=None, dtype=None))
        replace_experts(module, partial(self.grouped_product, options=linear), exact)
        if traits is not None and (fusion := self.fusion(traits, dtype, make_product)) is not None:
            fusion.run(module.model)
        replace_linears(module, make_product)

    def warm_up(self, module: nn.Module, dtype: torch.dtype, num_heads: int, shape: KVCacheShape) -> None:
        """Compile the kernels of a fused model's first step in advance."""

    def warm_up_adapters(self) -> None:
        """Compile the kernels that add an adapter's change to a matmul in advance, on a device without rehearsal."""

    @abstractmethod
    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Allocate zeros of the shape and dtype of a tensor without memory, for the KV pool."""

    def peak_bytes(self, run: Callable[[], None]) -> int:
        """Return the peak memory of `run` in addition to earlier use, on a device with rehearsal."""
        raise NotImplementedError

    @abstractmethod
    def free_bytes(self, config: EngineConfig) -> int:
        """Return the memory available for a KV pool."""

    @abstractmethod
    def total_bytes(self) -> int: ...

    def to_host(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Start one copy of all the tensors to the host, before the device's next work."""
        return HostCopy(list(tensors))

    def mark(self) -> DeviceEvent:
        """Return an event that is reached when the device has completed all submitted work."""
        return Reached()

    def is_alive(self) -> bool:
        """Return True if the device still executes work."""
        return True

    def claim(self, rank: int) -> None:
        """Select the device with this index for the calling thread."""

    @abstractmethod
    def collectives(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """Return torch's process group that connects ranks on such devices."""
