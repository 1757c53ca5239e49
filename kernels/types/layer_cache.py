"""One layer's keys and values in the paged pool."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

INTEGER_LIMIT = 127.0
FP8 = torch.float8_e4m3fn
FP8_LIMIT = 448.0  # the largest number that e4m3 holds
# A slot of zeros needs a scale too, and dividing by it must give zeros.
SMALLEST_PEAK = 1e-30


@dataclass(frozen=True, slots=True)
class LayerCache:
    """Blocks of keys and values, with a scale per slot and head where their dtype needs one.

    fp32, fp16 and bf16 hold the numbers themselves. int8 and fp8 (e4m3) hold them divided by the slot's scale for
    that head, which is the largest of them over the largest number of the dtype: no calibration, and one token's
    outlier costs no other token its precision.

    Values may be the keys themselves (`sharing_values`): of latent attention, which reads its values from the first
    numbers of its keys.
    """

    keys: torch.Tensor
    """[num_blocks, num_kv_heads, block_size, head_dim], contiguous."""
    values: torch.Tensor
    key_scales: torch.Tensor | None = None
    """fp32 [num_blocks, num_kv_heads, block_size], contiguous; None if the dtype does not need scales."""
    value_scales: torch.Tensor | None = None
    group: int = field(default=0, kw_only=True)
    """The group of layers by whose block tables it is read and written (`AttentionMetadata.of_group`)."""
    window: int | None = field(default=None, kw_only=True)
    """Keys before `first_visible` of this may have been freed; None: all exist."""
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
        """Everything that a block consists of, each tensor once; the first dimension of each is the block."""
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
    """The value that a scaled dtype's largest number represents; None for a dtype stored unscaled."""
    return {torch.int8: INTEGER_LIMIT, FP8: FP8_LIMIT}.get(dtype)


def allocate_layer(
    num_blocks: int,
    num_kv_heads: int,
    block_size: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
) -> LayerCache:
    """An empty layer. Zeroed, which costs nothing on Linux: fresh pages are zero until they are touched."""
    slots = (num_blocks, num_kv_heads, block_size)
    keys, values = (torch.zeros(*slots, head_dim, dtype=dtype, device=device) for _ in range(2))
    if largest_number(dtype) is None:
        return LayerCache(keys, values)
    key_scales, value_scales = (torch.zeros(slots, device=device) for _ in range(2))
    return LayerCache(keys, values, key_scales, value_scales)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as the bytes it is made of, any other dtype as it is: torch and Triton move few one-byte floats about."""
    return tensor.view(torch.uint8) if tensor.dtype is FP8 else tensor
