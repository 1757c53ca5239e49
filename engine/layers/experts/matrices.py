"""One weight matrix of each of a layer's experts, read when the matmul is created."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch


@dataclass(frozen=True, slots=True)
class ExpertMatrices:
    """Weights [out_features, in_features] of `num_experts` experts.

    They are read one at a time, and only the mapped file remains referenced.
    """

    num_experts: int
    out_features: int
    in_features: int
    dtype: torch.dtype
    """The model's dtype."""
    read: Callable[[int], torch.Tensor]
    """Maps an expert to its weight, with any dtype and strides."""
    bias: torch.Tensor | None = None
    """[num_experts, out_features]"""

    @classmethod
    def from_tensors(
        cls, stacked: torch.Tensor, bias: torch.Tensor | None = None, *, is_transposed: bool = False
    ) -> ExpertMatrices:
        """Wrap a tensor [num_experts, out_features, in_features], its last two dimensions swapped if transposed."""
        stacked = stacked.detach().transpose(1, 2) if is_transposed else stacked.detach()
        count, out_features, in_features = stacked.shape
        bias = None if bias is None else bias.detach()
        return cls(count, out_features, in_features, stacked.dtype, stacked.__getitem__, bias)

    def parted(self) -> ExpertMatrices:
        """Return the matrices with the even outputs followed by the odd ones."""

        def read(expert: int) -> torch.Tensor:
            weight = self.read(expert)
            return torch.cat([weight[0::2], weight[1::2]])

        bias = self.bias
        return replace(
            self, read=read, bias=None if bias is None else torch.cat([bias[:, 0::2], bias[:, 1::2]], dim=1)
        )

    def rounded(self, dtype: torch.dtype | None) -> ExpertMatrices:
        """Return the matrices with their values rounded to a dtype and converted back; None: unchanged."""
        if dtype in (None, torch.float32):
            return self
        return replace(self, read=lambda expert: self.read(expert).to(dtype).float())

    def dense(self, expert: int) -> torch.Tensor:
        """Return an expert's weight in the model's dtype."""
        return self.read(expert).to(self.dtype)

    def stacked(self, device: torch.device) -> torch.Tensor:
        """Return all of them as one tensor [num_experts, out_features, in_features] on a device."""
        sizes = (self.num_experts, self.out_features, self.in_features)
        out = torch.empty(sizes, dtype=self.dtype, device=device)
        for expert in range(self.num_experts):
            out[expert].copy_(self.read(expert))
        return out
