"""A quantized weight with a scale per output and group of inputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """W[o, order[i]] = (codes[o, i] - zeros[o, g]) * scales[o, g] + offsets[o, g], with g = i // group_size."""

    codes: torch.Tensor
    """[out_features, in_features]: uint8 or int8, or float8_e4m3fn without NaN"""
    scales: torch.Tensor
    """fp32 [out_features, num_groups]; num_groups divides in_features"""
    zeros: torch.Tensor | None = None
    """int16 [out_features, num_groups], only for integers; None: all are 0"""
    order: torch.Tensor | None = None
    """int64 [in_features], a permutation; None: the inputs are not permuted"""
    bits: int = 8
    """4: every code is one of 0 .. 15"""
    offsets: torch.Tensor | None = None
    """fp32 [out_features, num_groups], only if codes times scales are exact; None: all are 0"""

    @property
    def shape(self) -> tuple[int, int]:
        return self.codes.shape[0], self.codes.shape[1]

    @property
    def group_size(self) -> int:
        return self.codes.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """Return W in fp32, each value rounded once."""
        out_features, in_features = self.shape
        numbers = self.codes.float().view(out_features, -1, self.group_size)
        if self.zeros is not None:
            numbers -= self.zeros.float()[:, :, None]
        numbers.mul_(self.scales[:, :, None])
        if self.offsets is not None:
            numbers += self.offsets[:, :, None]
        weight = numbers.view(out_features, in_features)
        return weight if self.order is None else weight[:, torch.argsort(self.order)]

    def _changed(
        self, codes: torch.Tensor, of_groups: Callable[[torch.Tensor], torch.Tensor]
    ) -> GroupedWeight:
        """Return a weight of other codes, `of_groups` applied to each tensor [out_features, num_groups]."""
        zeros, offsets = (None if part is None else of_groups(part) for part in (self.zeros, self.offsets))
        return replace(self, codes=codes, scales=of_groups(self.scales), zeros=zeros, offsets=offsets)

    def to(self, device: torch.device) -> GroupedWeight:
        order = None if self.order is None else self.order.to(device)
        return replace(self._changed(self.codes.to(device), lambda part: part.to(device)), order=order)

    def in_groups_of(self, size: int) -> GroupedWeight:
        """Return the same weight in smaller groups. `size` divides the group size."""
        if (times := self.group_size // size) == 1:
            return self
        return self._changed(self.codes, lambda part: part.repeat_interleave(times, dim=1))

    def outputs(self, part: slice) -> GroupedWeight:
        return self._changed(self.codes[part], lambda per_group: per_group[part])

    def inputs(self, part: slice) -> GroupedWeight | None:
        """Return the weight of some inputs; None if these are not complete groups."""
        size = self.group_size
        if self.order is not None or part.start % size or part.stop % size:
            return None
        groups = slice(part.start // size, part.stop // size)
        return self._changed(self.codes[:, part], lambda per_group: per_group[:, groups])


def merged(weights: Sequence[GroupedWeight]) -> GroupedWeight | None:
    """Return one weight with the weights' outputs concatenated; None if their numbers are of different kinds."""
    first = weights[0]
    if len(weights) == 1:
        return first
    if any(weight.codes.dtype != first.codes.dtype or weight.bits != first.bits for weight in weights):
        return None
    if any(not _same(weight.order, first.order) for weight in weights):
        return None
    size = min(weight.group_size for weight in weights)
    if any(weight.group_size % size for weight in weights):
        return None
    parts = [weight.in_groups_of(size) for weight in weights]
    return GroupedWeight(
        torch.cat([part.codes for part in parts]),
        torch.cat([part.scales for part in parts]),
        _joined([part.zeros for part in parts], parts, torch.int16),
        first.order,
        first.bits,
        _joined([part.offsets for part in parts], parts, torch.float32),
    )


def _joined(
    per_group: Sequence[torch.Tensor | None], weights: Sequence[GroupedWeight], dtype: torch.dtype
) -> torch.Tensor | None:
    """Return concatenated zeros or offsets of these weights, 0 for those without; None if no weight has them."""
    if all(part is None for part in per_group):
        return None
    pairs = zip(per_group, weights, strict=True)
    return torch.cat(
        [torch.zeros_like(weight.scales, dtype=dtype) if part is None else part for part, weight in pairs]
    )


def _same(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    if left is None or right is None:
        return left is right
    return torch.equal(left, right)
