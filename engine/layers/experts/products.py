"""Grouped matmuls: rows sorted by expert times that expert's weight. The device chooses an implementation.

Each accepts rows [num_rows, in_features] and `offsets`, int64 [num_experts + 1]: the rows of expert e are
offsets[e] .. offsets[e + 1] - 1. It returns [num_rows, out_features].
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from torch import nn

from pagemill.engine.layers.experts.matrices import ExpertMatrices
from pagemill.engine.layers.int8_products import PlainInt8Product
from pagemill.kernels import dispatch

if TYPE_CHECKING:
    from pagemill.kernels.cpu.experts.grouped import GroupedWeights
    from pagemill.kernels.cpu.matmul.kinds import KindName

_GROUPED_CAPABILITIES = (9, 10)
"""Major compute capabilities for which torch has a grouped kernel: Hopper and data-center Blackwell."""

MakeGroupedProduct = Callable[[ExpertMatrices], nn.Module]


class StackedProduct(nn.Module):
    """All experts in one launch by Pagemill's kernel on a GPU; sequentially by torch on other devices."""

    def __init__(self, matrices: ExpertMatrices, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices.stacked(device), requires_grad=False)
        bias = matrices.bias
        self.bias = None if bias is None else nn.Parameter(bias.to(device).contiguous(), requires_grad=False)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return dispatch.expert_matmul(rows, self.weight, offsets, self.bias)


class TorchGroupedProduct(nn.Module):
    """All experts in one launch, by `torch._grouped_mm`.

    Without a kernel for the GPU and the weights, torch multiplies the experts sequentially, and waits for the device
    in each layer.
    """

    def __init__(self, matrices: ExpertMatrices, device: torch.device) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrices.stacked(device), requires_grad=False)

    @staticmethod
    def supports(matrices: ExpertMatrices, capability: Callable[[], tuple[int, int]]) -> bool:
        """Return True if torch has a kernel for these weights at this compute capability, and there is no bias."""
        return (
            matrices.dtype is torch.bfloat16
            and matrices.bias is None
            and not (matrices.in_features % 8 or matrices.out_features % 8)
            and capability()[0] in _GROUPED_CAPABILITIES
            and hasattr(torch, "_grouped_mm")
        )

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        ends = offsets[1:].to(torch.int32)
        out: torch.Tensor = torch._grouped_mm(rows, self.weight.transpose(1, 2), offs=ends)
        return out


class PackedGroupedProduct(nn.Module):
    """Matmul of fp32 rows by Pagemill's CPU kernel: weights in the fewest lossless bits, bfloat16 or int8."""

    def __init__(self, matrices: ExpertMatrices, kind: KindName) -> None:
        super().__init__()
        from pagemill.kernels.cpu.experts import grouped

        self._multiply = grouped.multiply
        self.panels, self.weights = _packed(matrices, kind)

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self._multiply(rows, offsets, self.weights)

    def warm_up(self) -> None:
        """Compile the kernels of a step, or load them from disk."""
        from pagemill.kernels.cpu.experts import grouped, rows

        grouped.warm_up(self.weights.kind)
        rows.warm_up()


def _packed(matrices: ExpertMatrices, kind: KindName) -> tuple[torch.Tensor, GroupedWeights]:
    from pagemill.kernels.cpu.experts.grouped import GroupedWeights, padded_bias
    from pagemill.kernels.cpu.matmul import bf16, int8
    from pagemill.kernels.cpu.matmul.weight_packing import pack_each

    count, shape = matrices.num_experts, (matrices.out_features, matrices.in_features)
    bias = padded_bias(matrices.bias, matrices.out_features)
    if kind == "fp32":
        weight = pack_each(matrices.read, count, shape)
        return weight.panels, GroupedWeights.of_floats(weight, bias, count)
    packed = {"int8": int8, "bf16": bf16}[kind].pack_each(matrices.read, count)
    return packed.panels, GroupedWeights(kind, packed.panels, packed.weight_format, bias, count, *shape)


class PlainInt8Experts(nn.Module):
    """The 8-bit integer results computed by torch, slowly, for installations without the kernels' compiler."""

    def __init__(self, matrices: ExpertMatrices) -> None:
        super().__init__()
        biases = [None] * matrices.num_experts if matrices.bias is None else list(matrices.bias)
        self.experts = nn.ModuleList(
            PlainInt8Product(matrices.read(expert), bias) for expert, bias in enumerate(biases)
        )
        self.out_features = matrices.out_features

    def forward(self, rows: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        out = rows.new_empty(len(rows), self.out_features)
        bounds = offsets.tolist()
        for expert, (low, high) in enumerate(pairwise(bounds)):
            if low < high:
                out[low:high] = self.experts[expert](rows[low:high])
        return out
