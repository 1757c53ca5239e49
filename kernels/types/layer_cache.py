"""One layer's keys and values in the paged pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

INTEGER_LIMIT = 127.0
FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0  # the largest value of e4m3
# A slot of zeros also needs a scale, and dividing by it must return zeros.
SMALLEST_PEAK = 1e-30


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Blocks of keys and values, with a scale per slot and head if their dtype needs one.

    fp32, fp16 and bf16 store the values directly. int8 and fp8 (e4m3) store them divided by the slot's scale
    for that head. The scale is the largest magnitude over the largest value of the dtype. This needs no
    calibration, and an outlier in one token does not reduce the precision of others.

    Values can be the keys themselves (`sharing_values`), for latent attention, which reads its values from
    the first elements of its keys.
    """

    keys: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], contiguous."""
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    """fp32 [num_blocks, num_kv_heads, block_size], contiguous; None if the dtype does not need scales."""
    value_scales: torch.Tensor | None = None
    group: int = field(default=0, kw_only=True)
    """The group of layers whose block tables it uses (`AttentionMetadata.of_group`)."""
    window: int | None = field(default=None, kw_only=True)
    """Keys before this window's `first_visible` may have been freed; None: all exist."""
    attention: str = field(default="auto", kw_only=True)
    """`EngineConfig.attention_backend`: the library that reads it on a GPU."""

    @property
    def block_size(self) -> int:
        return self.keys.shape[2]

    @property
    def num_kv_heads(self) -> int:
        return self.keys.shape[1]

    @property
    def is_scaled(self) -> bool:
        return self.key_scales is not None

    def tensors(self) -> Iterator[torch.Tensor]:
        """Yield every tensor of a block once; the first dimension of each is the block."""
        yield self.keys
        if self.values is not self.keys:
            yield self.values
        if self.key_scales is not None and self.value_scales is not None:
            yield self.key_scales
            if self.value_scales is not self.key_scales:
                yield self.value_scales

    def sharing_values(self) -> LayerCache:
        """Return the cache with its keys as values."""
        return replace(self, values=self.keys, value_scales=self.key_scales)

    def converted(self, convert: Callable[[torch.Tensor], torch.Tensor]) -> LayerCache:
        """Return the cache with each of its tensors converted; shared tensors remain shared."""
        tensors = {id(tensor): convert(tensor) for tensor in self.tensors()}
        key_scales, value_scales = (
            None if scales is None else tensors[id(scales)] for scales in (self.key_scales, self.value_scales)
        )
        return replace(
            self,
            keys=tensors[id(self.keys)],
            values=tensors[id(self.values)],
            key_scales=key_scales,
            value_scales=value_scales,
        )


def largest_number(dtype: torch.dtype) -> float | None:
    """Return the largest value of a scaled dtype; None for a dtype stored unscaled."""
    return {torch.int8: INTEGER_LIMIT, FP8: FP8_LIMIT}.get(dtype)


def allocate_layer(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """Return an empty, zeroed layer. Zeroing costs nothing on Linux: new pages are zero until they are touched."""
    slots = (num_blocks, num_kv_heads, block_size)
    keys, values = (torch.zeros(*slots, head_dim, dtype=dtype, device=device) for _ in range(2))
    if largest_number(dtype) is None:
        return LayerCache(keys, values)
    key_scales, value_scales = (torch.zeros(slots, device=device) for _ in range(2))
    return LayerCache(keys, values, key_scales, value_scales)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """View fp8 as bytes, and return other dtypes unchanged: few operators of torch and Triton copy one-byte floats."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor
