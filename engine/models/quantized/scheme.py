"""The interface of a quantized checkpoint format, and checks shared by all formats."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import gcd
from typing import Any

import torch

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.kernels.types.grouped_weight import GroupedWeight

INTEGER_SIZES = (2, 4, 8)
"""Bits of integers that fill 32-bit words."""
_SCALE_DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors that represent one weight, by the last part of their names."""

    module: str
    tensors: Mapping[str, torch.Tensor]
    dtype: torch.dtype
    """The model's dtype."""

    def __contains__(self, part: str) -> bool:
        return part in self.tensors

    def take(
        self, part: str, dtypes: tuple[torch.dtype, ...], *shapes: tuple[int | None, ...]
    ) -> torch.Tensor:
        """Return a tensor with one of these dtypes and shapes; None: any size. Raises `ModelLoadError`."""
        tensor = self.tensors.get(part)
        if tensor is None:
            raise ModelLoadError(f"{self.module}.{part} is missing")
        if tensor.dtype not in dtypes:
            expected = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
            found = str(tensor.dtype).removeprefix("torch.")
            raise ModelLoadError(f"{self.module}.{part} is {found}, expected {expected}")
        if not any(_fits(tensor.shape, shape) for shape in shapes):
            expected = " or ".join(str(list(shape)).replace("None", "any") for shape in shapes)
            raise ModelLoadError(
                f"{self.module}.{part} has shape {list(tensor.shape)}, quantization_config asks for {expected}"
            )
        return tensor

    def scales(self, part: str, *shapes: tuple[int | None, ...]) -> torch.Tensor:
        """Return a tensor of finite scales. Raises `ModelLoadError`."""
        scales = self.take(part, _SCALE_DTYPES, *shapes)
        if not bool(scales.isfinite().all()):
            raise ModelLoadError(f"{self.module}.{part} is not finite")
        return scales

    def weight(
        self, out_features: int, in_features: int, read: Callable[[], GroupedWeight | torch.Tensor]
    ) -> QuantizedWeight:
        return QuantizedWeight((out_features, in_features), self.dtype, read)

    def group_order(self, part: str, in_features: int, group_size: int) -> torch.Tensor | None:
        """Return the order that makes each group's inputs contiguous; None: they are. Raises `ModelLoadError`."""
        if part not in self:
            return None
        groups = self.take(part, (torch.int32, torch.int64), (in_features,)).long()
        num_groups = -(-in_features // group_size)
        if int(groups.min()) < 0 or int(groups.max()) >= num_groups:
            raise ModelLoadError(
                f"{self.module}.{part} names group {int(groups.max())}, there are {num_groups}: the file is damaged"
            )
        if torch.equal(groups, torch.arange(in_features) // group_size):
            return None
        if bool((groups.bincount(minlength=num_groups) != group_size).any()):
            raise ModelLoadError(
                f"{self.module}.{part} has groups of other sizes than {group_size}: the file is damaged"
            )
        return torch.argsort(groups, stable=True)


def _fits(found: tuple[int, ...], shape: tuple[int | None, ...]) -> bool:
    return len(found) == len(shape) and all(
        want in (None, size) for size, want in zip(found, shape, strict=True)
    )


class Scheme(ABC):
    """A format, with the settings of one checkpoint's `quantization_config`."""

    method: str
    """`quant_method`."""
    main: str
    """The part that every quantized weight includes."""
    parts: tuple[str, ...]
    """Optional settings."""
    has_quantized_tensors = True
    """Whether every checkpoint of the format has a configuration."""

    @abstractmethod
    def describe(self) -> str:
        """Return the settings that determine the weights, for the log and the fingerprint."""

    @abstractmethod
    def weight(self, parts: Parts) -> QuantizedWeight:
        """Return the weight that these tensors represent. Only inspects shapes and small tensors.

        Raises:
            ModelLoadError: a tensor is missing or damaged, or does not match the configuration.
        """

    def weights(self, parts: Parts) -> dict[str, QuantizedWeight]:
        """Return the represented weights by name: one, or one per expert. Raises like `weight`."""
        return {self.weight_name(parts.module): self.weight(parts)}

    def is_quantized(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Return True if a module's tensors represent a quantized weight."""
        return self.main in tensors

    def weight_name(self, module: str) -> str:
        """Return the name of the tensor that a weight represents."""
        return f"{module}.weight"

    def split_name(self, name: str) -> tuple[str, str]:
        """Return the weight to which a tensor belongs, and the tensor's part in it."""
        module, _, part = name.rpartition(".")
        return module, part


def setting(config: Mapping[str, Any], name: str, kind: type, default: Any = None) -> Any:
    """Return a field of `quantization_config`. Raises `ModelLoadError` if it is absent or has a wrong type."""
    value = config.get(name)
    if value is None:
        value = default
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        raise ModelLoadError(f"can't read quantization_config: {name} is {value!r}")
    return value


def choice(config: Mapping[str, Any], name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    """Return a field of `quantization_config` with one of these values. Raises `ModelLoadError`."""
    value = config.get(name)
    if value is None:
        value = default
    if value not in supported:
        listed = ", ".join(map(str, supported))
        raise ModelLoadError(
            f"{name}={value!r} of quantization_config is not supported (supported: {listed}); "
            "give the original checkpoint"
        )
    return value


def group_size_of(config: Mapping[str, Any], default: int | None = None) -> int:
    """Return `group_size`; -1 for entire rows. Raises `ModelLoadError`."""
    size: int = setting(config, "group_size", int, default)
    if size < 1 and size != -1:
        raise ModelLoadError(f"can't read quantization_config: group_size is {size}")
    return size


def even_groups(per_group: torch.Tensor, in_features: int, group_size: int) -> torch.Tensor:
    """Return [out_features, num_groups] with groups of equal size, even if the last one was shorter."""
    size = gcd(in_features, group_size)
    if size == group_size:
        return per_group
    return per_group.repeat_interleave(group_size // size, dim=1)[:, : in_features // size].contiguous()
