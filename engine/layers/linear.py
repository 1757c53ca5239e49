"""The linear layer: one class for any matmul, of one layer or several, complete or a rank's share.

The device chooses the matmul (`DeviceBackend.product`). `F.linear` on a CPU reorders the weights in every
call, which for the few rows of a decode step costs more than the matmul, so they are packed once there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import torch
from torch import nn

from pagemill.engine.layers.quantized_weight import QuantizedWeight, Weight, dense
from pagemill.engine.layers.sharded_linear import PartialLinear
from pagemill.kernels import dispatch
from pagemill.kernels.types.low_rank import AdapterRows, LowRankTable
from pagemill.kernels.types.scaled_rows import ScaledRows

if TYPE_CHECKING:
    from pagemill.kernels.cpu.matmul.kinds import KindName
    from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight

Matmul = Literal["own", "onednn"]
"""Whose kernels multiply by unquantized weights on a CPU."""
MakeProduct = Callable[[Sequence[Weight], torch.Tensor | None], nn.Module | None]
"""Maps weights [out_features, in_features], whose outputs are concatenated, and their bias to a module that
multiplies rows [num_rows, in_features]. None: the layers themselves are at least as fast.

A matmul of quantized weights reports their stored form as `kept_as`, unless it dequantized them. One that rounds
its rows to 8 bits reports the dtype as `rounds_to`, and also accepts `ScaledRows`."""


_adapter_rows: ContextVar[tuple[AdapterRows, ...]] = ContextVar("adapter_rows", default=())


@contextmanager
def adapter_rows(*kinds: AdapterRows | None) -> Iterator[None]:
    """Apply adapters inside the block to a step's tokens, or to other rows that layers compute; None: none has one."""
    token = _adapter_rows.set(tuple(kind for kind in kinds if kind is not None))
    try:
        yield
    finally:
        _adapter_rows.reset(token)


def has_adapter_rows() -> bool:
    return bool(_adapter_rows.get())


def _adapters_of(num_rows: int) -> AdapterRows | None:
    """Return the adapters of a layer's rows; None if there are none."""
    kinds = _adapter_rows.get()
    return next((kind for kind in kinds if len(kind.slots) == num_rows), kinds[0] if kinds else None)


@dataclass(frozen=True, slots=True)
class LinearOptions:
    quantization: str | None = None
    """int8, fp8, or None: the dtype of the weights."""
    row_invariant: bool = False
    """Each row's result is bit-identical regardless of the other rows."""
    dtype: torch.dtype | None = None
    """The dtype to which matmuls round their operands, if the device supports it; None: that of the weights."""
    matmul: Matmul = "own"


class Linear(nn.Module):
    """y = x W^T + b. Accepts [..., in_features], or rows rounded to `rounds_to`."""

    def __init__(
        self, product: nn.Module, in_features: int, out_features: int, part: PartialLinear | None = None
    ) -> None:
        """`part`: how the ranks combine their results if each has a share of the layer."""
        super().__init__()
        self.product, self.part = product, part
        self.in_features, self.out_features = in_features, out_features
        self.dtype: torch.dtype | None = None
        """Bytes of the weights of its source layers."""
        self.kept_as: str | None = None
        """Stored form of the weights of a quantized checkpoint."""
        self.sources: tuple[tuple[str, int], ...] = ()
        """The paths of its source layers, and their numbers of outputs, in order."""
        self.adapters: LowRankTable | None = None
        """The adapters' part for each of `sources`."""

    @classmethod
    def from_layers(cls, layers: Sequence[nn.Linear], make_product: MakeProduct) -> Linear:
        """Merge layers into one with their outputs concatenated. It adopts their weights."""
        part = layers[0] if isinstance(layers[0], PartialLinear) else None
        weights = [weight_of(layer) for layer in layers]
        is_quantized = any(isinstance(weight, QuantizedWeight) for weight in weights)
        bias = None if part is not None else _joined_bias(layers)
        product = make_product(weights, bias)
        if product is None:
            is_alone = len(layers) == 1 and part is None and not is_quantized
            product = layers[0] if is_alone else DenseProduct(dense(weights), bias)
        if part is not None:
            part.register_parameter("weight", None)
            part.stored = None
        linear = cls(product, layers[0].in_features, sum(layer.out_features for layer in layers), part)
        linear.dtype = getattr(layers[0].weight, "dtype", None)
        linear.sources = tuple((str(getattr(layer, "path", "")), layer.out_features) for layer in layers)
        if is_quantized:
            widened = f"widened to {str(weights[0].dtype).removeprefix('torch.')}"
            linear.kept_as = getattr(product, "kept_as", None) or widened
        return linear

    @property
    def weight(self) -> torch.Tensor:
        """An empty tensor: some modules convert their input to the dtype of a layer's weight."""
        return torch.empty(0, dtype=self.dtype)

    @property
    def rounds_to(self) -> torch.dtype | None:
        """The 8-bit dtype to which the matmul rounds its rows; None: it does not round."""
        dtype: torch.dtype | None = getattr(self.product, "rounds_to", None)
        return dtype

    def forward(self, x: torch.Tensor | ScaledRows) -> torch.Tensor:
        rows = x if isinstance(x, ScaledRows) else x.reshape(-1, self.in_features)
        if (
            isinstance(rows, torch.Tensor) and rows.stride(-1) != 1
        ):  # a view of a tensor that a convolution has returned
            rows = rows.contiguous()
        product: torch.Tensor = self.product(rows).to(x.dtype)
        if self.adapters is not None and (adapted := _adapters_of(len(product))) is not None:
            given = rows.kept if isinstance(rows, ScaledRows) else rows
            assert given is not None
            dispatch.add_low_rank(product, given, self.adapters, adapted)
        out = product.view(*x.shape[:-1], self.out_features)
        return out if self.part is None else self.part.complete(out)

    def of_channels(self, channels: torch.Tensor) -> Linear | None:
        """Return a bit-identical layer with only these outputs; None if the matmul does not support it."""
        product: Any = self.product
        if self.part is not None or not hasattr(product, "of_channels"):
            return None
        return Linear(product.of_channels(channels), self.in_features, len(channels))


class DenseProduct(nn.Module):
    """The matmul by torch, with unchanged weights."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight, requires_grad=False)
        self.bias = None if bias is None else nn.Parameter(bias, requires_grad=False)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(rows, self.weight, self.bias)


class PackedProduct(nn.Module):
    """The matmul by Pagemill's kernel, for fp32 on CPU. W is stored in the fewest lossless bits."""

    kind: ClassVar[KindName] = "fp32"
    kept_as: str | None = None
    """The stored form of a quantized checkpoint's weights, if it is preserved."""

    def __init__(self, packed: PackedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        from pagemill.kernels.cpu.matmul import fp32_tile

        self._multiply = self.kernel().multiply
        self.packed = packed
        self.panels = self.packed.panels
        self.bias = torch.zeros(len(self.panels) * fp32_tile.PANEL)
        if bias is not None:
            self.bias[: self.packed.out_features] = bias

    @staticmethod
    def kernel() -> Any:
        """Return the module with `multiply` and `warm_up`."""
        from pagemill.kernels.cpu.matmul import fp32

        return fp32

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(rows, self.packed, self.bias)
        return out

    @classmethod
    def from_weights(cls, weights: Sequence[torch.Tensor], bias: torch.Tensor | None) -> PackedProduct:
        from pagemill.kernels.cpu.matmul.weight_packing import pack_merged

        return cls(pack_merged(weights), bias)

    def of_channels(self, channels: torch.Tensor) -> PackedProduct:
        return PackedProduct.from_weights([self.packed.of_channels(channels)], self.bias[channels])


class OneDNNProduct(nn.Module):
    """The matmul with oneDNN's packing, for CPUs where Pagemill's kernel is not supported or slower.

    Its sums run over the inputs in one order regardless of the number of rows, except for a single row, which it
    treats as a vector.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, *, row_invariant: bool) -> None:
        """`weight`: fp32, or bfloat16, to which rows and results are then rounded."""
        super().__init__()
        self._fewest_rows = 2 if row_invariant else 1
        # An opaque tensor, usable only for multiplication.
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), None)
        self._bias = None if bias is None else bias.to(weight.dtype).contiguous()
        self._dtype = weight.dtype

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        num_rows = len(rows)
        rows = rows.to(self._dtype)
        if num_rows < self._fewest_rows:
            rows = rows.expand(self._fewest_rows, -1).contiguous()
        out: torch.Tensor = torch.ops.mkldnn._linear_pointwise(rows, self._packed, self._bias, "none", [], "")
        return out[:num_rows].float()


def note_paths(module: nn.Module) -> None:
    """Store the present path in every linear layer, for `Linear.sources`."""
    for path, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            layer.path = path


def weight_of(layer: nn.Linear) -> Weight:
    """Return the weight of a layer in its checkpoint's format."""
    stored: QuantizedWeight | None = getattr(layer, "stored", None)
    return layer.weight.detach() if stored is None else stored


def _joined_bias(layers: Sequence[nn.Linear]) -> torch.Tensor | None:
    if all(layer.bias is None for layer in layers):
        return None
    known = next(layer.bias for layer in layers if layer.bias is not None)
    biases = [known.new_zeros(layer.out_features) if layer.bias is None else layer.bias for layer in layers]
    return torch.cat([bias.detach() for bias in biases])


def replace_linears(parent: nn.Module, make_product: MakeProduct) -> None:
    """Replace the remaining linear layers below `parent` by `Linear`."""
    for name, child in parent.named_children():
        if getattr(child, "is_read", False):
            continue
        # A subclass may compute more than a matmul, such as a router.
        is_product = type(child).forward is nn.Linear.forward or isinstance(child, PartialLinear)
        if is_product and isinstance(child, nn.Linear):
            setattr(parent, name, Linear.from_layers([child], make_product))
        elif not isinstance(child, Linear):
            replace_linears(child, make_product)
