"""A quantized weight in the layout of the GPU's matmul."""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from pagemill.kernels.types.grouped_weight import GroupedWeight

SMALLEST_CHUNK, LARGEST_CHUNK = 32, 128
_FLOAT8_SCALE = 256.0


@dataclass(frozen=True, slots=True)
class TiledWeight:
    """A `GroupedWeight` without an order, one chunk of inputs at a time."""

    codes: torch.Tensor
    """uint8 [out_features, in_features / 2], or int8 or uint8 [out_features, in_features], floats as their bits.

    In the first, byte j of a chunk has input j in the low half, and input j + chunk / 2 in the high one.
    """
    scales: torch.Tensor
    """fp32 [out_features, num_groups]; for floats multiplied by 256, since their bits are read as fp16"""
    zeros: torch.Tensor | None
    """int16 [out_features, num_groups]"""
    order: torch.Tensor | None
    """int64 [in_features]: the order of its rows' values in the matmul"""
    chunk: int
    """Inputs: a power of two from 32 to 128 that divides a group"""
    is_packed: bool
    is_float: bool

    @classmethod
    def from_weight(cls, weight: GroupedWeight) -> TiledWeight | None:
        """Return None if the groups have offsets, a size that is not a power of two, or fewer than 32 inputs."""
        chunk = gcd(weight.group_size, LARGEST_CHUNK)
        if chunk < SMALLEST_CHUNK or weight.offsets is not None:
            return None
        is_packed = weight.bits == 4 and weight.codes.dtype is torch.uint8
        is_float = weight.codes.dtype is torch.float8_e4m3fn
        codes, scales = weight.codes, weight.scales
        if is_packed:
            halves = codes.view(len(codes), -1, 2, chunk // 2)
            codes = (halves[:, :, 0] | (halves[:, :, 1] << 4)).reshape(len(codes), -1)
        if is_float:
            codes, scales = codes.view(torch.uint8), scales * _FLOAT8_SCALE
        return cls(
            codes.contiguous(), scales.contiguous(), weight.zeros, weight.order, chunk, is_packed, is_float
        )

    @property
    def in_features(self) -> int:
        return self.codes.shape[1] * (2 if self.is_packed else 1)

    @property
    def bits(self) -> int:
        return 4 if self.is_packed else 8

    def numbers(self) -> torch.Tensor:
        """Return the weight in fp32, [out_features, in_features], with its inputs in the matmul's order."""
        codes, out_features = self.codes, len(self.codes)
        if self.is_packed:
            halves = codes.view(out_features, -1, 1, self.chunk // 2)
            codes = torch.cat([halves & 15, halves >> 4], dim=2)
        if self.is_float:
            codes = codes.view(torch.float8_e4m3fn)
        numbers = codes.float().view(out_features, self.scales.shape[1], -1)
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        scales = self.scales / _FLOAT8_SCALE if self.is_float else self.scales
        return (numbers * scales[:, :, None]).view(out_features, -1)
