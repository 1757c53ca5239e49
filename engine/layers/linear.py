"""The linear layer: one class for any product, of one layer or several, whole or a rank's share.

The device chooses the product (`DeviceBackend.product`). `F.linear` on a CPU reorders the weights in every
call, which for the few rows of a decode step costs more than the product; so there they are packed once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pagemill.engine.layers.sharded_linear import PartialLinear

MakeProduct = Callable[[Sequence[torch.Tensor], torch.Tensor | None], nn.Module | None]
"""Maps weights [out_features, in_features], whose outputs are concatenated, and their bias to a module that
multiplies rows [num_rows, in_features]. None: no product is better than the layers themselves."""


@dataclass(frozen=True, slots=True)
class LinearOptions:
    quantization: str | None = None
    """int8, or None: the weights' own dtype."""
    row_invariant: bool = False
    """A row's product is the same to the last bit whatever the other rows."""


class Linear(nn.Module):
    """y = x W^T + b. Takes [..., in_features]."""

    def __init__(
        self, product: nn.Module, in_features: int, out_features: int, part: PartialLinear | None = None
    ) -> None:
        """`part`: how the ranks combine their products if each has a share of the layer."""
        super().__init__()
        self.product, self.part = product, part
        self.in_features, self.out_features = in_features, out_features

    @classmethod
    def of(cls, layers: Sequence[nn.Linear], make_product: MakeProduct) -> Linear:
        """Merge layers into one with their outputs concatenated. It takes over their weights."""
        part = layers[0] if isinstance(layers[0], PartialLinear) else None
        weights = [layer.weight.detach() for layer in layers]
        bias = None if part is not None else _joined_bias(layers)
        product = make_product(weights, bias)
        if product is None:
            is_alone = len(layers) == 1 and part is None
            product = layers[0] if is_alone else _DenseProduct(joined(weights), bias)
        if part is not None:
            part.register_parameter("weight", None)
        return cls(product, layers[0].in_features, sum(layer.out_features for layer in layers), part)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.product(x.reshape(-1, self.in_features))
        out = rows.to(x.dtype).view(*x.shape[:-1], self.out_features)
        return out if self.part is None else self.part.complete(out)

    def of_channels(self, channels: torch.Tensor) -> Linear | None:
        """Return the layer of only these outputs, the same to the last bit; None if the product has none."""
        product: Any = self.product
        if self.part is not None or not hasattr(product, "of_channels"):
            return None
        return Linear(product.of_channels(channels), self.in_features, len(channels))


class _DenseProduct(nn.Module):
    """The product by torch, from the weights as they are."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class PackedProduct(nn.Module):
    """The product by our own kernel, for fp32 on CPU. W is kept in the fewest bits that are lossless."""

    def __init__(self, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> None:
        super().__init__()
        from pagemill.kernels.cpu.matmul import fp32, fp32_tile, weight_packing

        self._multiply = fp32.multiply
        self.packed = weight_packing.pack_merged(weights)
        self.panels = self.packed.panels
        self.bias = torch.zeros(len(self.panels) * fp32_tile.PANEL)
        if bias is not None:
            self.bias[: self.packed.out_features] = bias

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self._multiply(rows, self.packed, self.bias)

    def of_channels(self, channels: torch.Tensor) -> PackedProduct:
        return PackedProduct([self.packed.of_channels(channels)], self.bias[channels])


class OneDNNProduct(nn.Module):
    """The same with oneDNN's packing, for CPUs that our kernel does not support.

    Its sums run over the inputs in one order whatever the number of rows, except for a single row, which it
    treats as a vector.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, row_invariant: bool) -> None:
        super().__init__()
        self._fewest_rows = 2 if row_invariant else 1
        # An opaque tensor, usable only for multiplication.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = None if bias is None else bias.contiguous()

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows)
        if num_rows < self._fewest_rows:
            rows = rows.expand(self._fewest_rows, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out[:num_rows]


def joined(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return one weight with the weights' outputs concatenated."""
    return weights[0] if len(weights) == 1 else torch.cat(list(weights))


def _joined_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    biases = [
        layer.weight.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers
    ]
    return joined([bias.detach() for bias in biases])


def replace_linears(parent: nn.Module, make_product: MakeProduct) -> None:
    """Replace the remaining linear layers below `parent` by `Linear`."""
    for name, child in parent.named_children():
        # A subclass may compute more than a product: a router, for one.
        is_product = type(child).forward is nn.Linear.forward or isinstance(child, PartialLinear)
        if is_product and isinstance(child, nn.Linear):
            setattr(parent, name, Linear.of([child], make_product))
        elif not isinstance(child, Linear):
            replace_linears(child, make_product)
