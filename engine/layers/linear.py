"""Linear layers with their weights in the order that the CPU's matrix product reads them.

`F.linear` reorders the weights in every call; for the few rows of a decode step that costs more than the product.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from pagemill.engine.layers.int8_linear import Int8Linear


@dataclass(frozen=True, slots=True)
class LinearOptions:
    quantization: str | None = None
    """int8, or None: as the weights are."""
    row_invariant: bool = False
    """A row's product is the same to the last bit whatever rows stand beside it."""


class PackedLinear(nn.Module):
    """y = x W^T + b with W packed once by our own kernel, for fp32 on CPU. Takes [..., in_features].

    W is kept in the fewest bits that give back every number. Several weights: their outputs side by side.
    """

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        super().__init__()
        from pagemill.kernels.cpu.matmul import fp32, fp32_tile, weight_packing

        self._multiply = fp32.multiply
        self.packed = weight_packing.pack_merged([weight.detach() for weight in weights])
        self.in_features, self.out_features = self.packed.in_features, self.packed.out_features
        self.panels = self.packed.panels
        self.bias = torch.zeros(len(self.panels) * fp32_tile.PANEL)
        if bias is not None:
            self.bias[: self.out_features] = bias.detach()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        return self._multiply(rows, self.packed, self.bias).view(*x.shape[:-1], self.out_features)

    def of_channels(self, channels: torch.Tensor) -> PackedLinear:
        """The layer with these outputs alone, the same to the last bit."""
        return PackedLinear([self.packed.of_channels(channels)], self.bias[channels])


class OneDNNLinear(nn.Module):
    """The same with oneDNN's packing, for CPUs that our kernel is not made for.

    Its sums run over the inputs in one order whatever the number of rows, but for a lone row, which it treats as a
    vector.
    """

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, *, row_invariant: bool = False
    ) -> None:
        super().__init__()
        self._fewest_rows = 2 if row_invariant else 1
        self.in_features, self.out_features = weight.shape[1], weight.shape[0]
        # An opaque tensor: it can be multiplied with, and nothing else.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach().contiguous(), None)
        self._bias = None if bias is None else bias.detach().contiguous()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = x.reshape(-1, self.in_features)
        num_rows = len(rows)
        if num_rows < self._fewest_rows:
            rows = rows.expand(self._fewest_rows, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out[:num_rows].view(*x.shape[:-1], self.out_features)


def has_packed_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether layers are packed here; every product is then the same whatever the number of rows."""
    has_onednn: bool = torch._C._has_mkldnn
    return has_onednn and device.type == "cpu" and dtype is torch.float32


def make_linear(weight: torch.Tensor, bias: torch.Tensor | None, options: LinearOptions) -> nn.Module | None:
    """The fast layer for y = x W^T + b, weight [out_features, in_features]; None where there is none better."""
    return _make_merged([weight], bias, options)


def _make_merged(
    weights: Sequence[torch.Tensor], bias: torch.Tensor | None, options: LinearOptions
) -> nn.Module | None:
    if options.quantization == "int8":
        return Int8Linear(_below_each_other(weights), bias)
    if not has_packed_products(weights[0].device, weights[0].dtype):
        return None
    if _has_own_kernel():
        return PackedLinear(weights, bias)
    return OneDNNLinear(_below_each_other(weights), bias, row_invariant=options.row_invariant)


def _below_each_other(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


@cache
def _has_own_kernel() -> bool:
    if importlib.util.find_spec("numba") is None:
        return False
    from pagemill.kernels.cpu.matmul import fp32

    return fp32.is_supported()


def merged_linear(layers: Sequence[nn.Linear], options: LinearOptions) -> nn.Module:
    """One layer whose output is the layers' outputs side by side; packed where the device gains from it."""
    weights = [layer.weight.detach() for layer in layers]
    biases = [layer.bias for layer in layers]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                layer.weight.new_zeros(layer.out_features) if b is None else b.detach()
                for layer, b in zip(layers, biases, strict=True)
            ]
        )
    fast = _make_merged(weights, bias, options)
    if fast is not None:
        return fast
    weight = _below_each_other(weights)
    merged = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    merged.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        merged.bias = nn.Parameter(bias, requires_grad=False)
    return merged


def fast_linear(layer: nn.Linear, options: LinearOptions) -> nn.Module:
    """The fast layer that computes `layer`; itself where there is none."""
    return make_linear(layer.weight, layer.bias, options) or layer
