"""What differs between devices, in one place: chosen once at a start, and asked from then on."""

# ruff: noqa: B027 (an empty method is a default, and not a forgotten decorator)

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch
from torch import nn

from pagemill.engine.config import EngineConfig, StepDefaults
from pagemill.engine.layers.decoder_traits import DecoderTraits
from pagemill.engine.layers.fusion import Fusion
from pagemill.engine.layers.kv_cache_shape import KVCacheShape
from pagemill.engine.layers.linear import LinearOptions, MakeProduct, replace_linears

NO_BATCH_INVARIANCE = (
    "batch_invariant needs device=cpu and dtype=float32, with numba and oneDNN: elsewhere the order of a product's "
    "sums depends on the number of rows"
)


class Mark(Protocol):
    """A point in what the device was given; reached when all before it is done."""

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class Reached:
    """A mark of a device that has done everything when a call returns."""

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class HostCopy:
    """A tensor on its way to the host. Waiting for it does not wait for what was launched after it."""

    host: torch.Tensor
    copied: Mark = Reached()  # noqa: RUF009 (it has no state)

    def wait(self) -> torch.Tensor:
        self.copied.synchronize()
        return self.host


class DeviceBackend(ABC):
    """A device. The defaults are those of one that shares the host's memory and runs what it is told at once."""

    device: torch.device
    step_defaults = StepDefaults()
    is_apart = False
    """It has memory of its own: arrays cross in one copy a step, from pages that stay where they are."""
    captures_graphs = False
    """Decode steps are recorded once and replayed."""
    draws_on_device = False
    """Random rows are drawn by `pagemill.kernels.dispatch.sample_tokens`, which neither sorts nor waits."""
    int8_scale_span: str
    """What shares a scale in products of int8."""

    @abstractmethod
    def check(self, config: EngineConfig, dtype: torch.dtype) -> None:
        """Raise `ConfigError` for what is asked of a model of this dtype and can't be had here."""

    @abstractmethod
    def default_dtype(self, declared: Any) -> torch.dtype:
        """What `dtype="auto"` stands for; `declared`: by the checkpoint, if it is a dtype."""

    @abstractmethod
    def product(
        self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None, options: LinearOptions
    ) -> nn.Module | None:
        """What multiplies best by these weights, as `MakeProduct` has it."""

    @abstractmethod
    def fusion(self, traits: DecoderTraits, dtype: torch.dtype, make_product: MakeProduct) -> Fusion | None:
        """What rewrites a decoder; None: its modules stay as they are."""

    def fuse(
        self, module: Any, traits: DecoderTraits | None, dtype: torch.dtype, linear: LinearOptions
    ) -> None:
        """Rewrite what is known of a causal language model's modules, and its linear layers."""
        make_product = partial(self.product, options=linear)
        if traits is not None and (fusion := self.fusion(traits, dtype, make_product)) is not None:
            fusion.run(module.model)
        replace_linears(module, make_product)

    def warm_up(self, module: nn.Module, dtype: torch.dtype, num_heads: int, shape: KVCacheShape) -> None:
        """Compile what a fused model of this dtype needs before its first step needs it."""

    @abstractmethod
    def zeros(self, like: torch.Tensor) -> torch.Tensor:
        """Zeros of the shape and dtype of a tensor without memory, for the KV pool."""

    @abstractmethod
    def free_bytes(self, config: EngineConfig) -> int:
        """The memory that a KV pool may take."""

    @abstractmethod
    def total_bytes(self) -> int: ...

    def to_host(self, tensor: torch.Tensor) -> HostCopy:
        return HostCopy(tensor)

    def mark(self) -> Mark:
        """Reached by the device when it has done all that it was given until now."""
        return Reached()

    def is_alive(self) -> bool:
        """Whether it still runs what it is given."""
        return True

    def claim(self, rank: int) -> None:
        """Compute on the device of this number of several, on the calling thread from now on."""

    @abstractmethod
    def collectives(self, store: Any, rank: int, size: int, timeout: timedelta) -> Any:
        """The process group of torch's through which ranks on such devices talk."""
