"""Matmuls with low-bit weights. Only `ScaledProduct` rounds activations."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pagemill.engine.layers.linear import DenseProduct, PackedProduct
from pagemill.engine.layers.quantized_weight import Weight, dense, grouped
from pagemill.kernels import dispatch
from pagemill.kernels.types.grouped_weight import GroupedWeight
from pagemill.kernels.types.scaled_rows import ScaledRows
from pagemill.kernels.types.tiled_weight import TiledWeight

_FLOAT8_MULTIPLE = 16


def packed_product(weights: Sequence[Weight], bias: torch.Tensor | None) -> nn.Module:
    """Return the CPU's fp32 matmul, with low-bit weights if they have a known lossless form."""
    whole = grouped(weights)
    if whole is None:
        return PackedProduct.from_weights([dense([weight]) for weight in weights], bias)
    from pagemill.kernels.cpu.matmul.grouped_packing import pack_grouped

    packed = pack_grouped(whole)
    if packed is None:
        return PackedProduct.from_weights([whole.dequantize()], bias)
    product = PackedProduct(packed, bias)
    product.kept_as = _form(packed.weight_format)
    if whole.order is None:
        return product
    return ReorderedProduct(product, whole.order)


def _form(weight_format: int) -> str:
    from pagemill.kernels.cpu.matmul import weight_formats

    forms = {
        weight_formats.NIBBLES: "4-bit integers",
        weight_formats.BYTES: "8-bit integers",
        weight_formats.FLOAT8: "8-bit floats",
    }
    return f"{forms[weight_format]}, lossless"


class ReorderedProduct(nn.Module):
    """A matmul whose weight has reordered inputs (GPTQ's act-order), and sums in that order."""

    def __init__(self, product: PackedProduct, order: torch.Tensor) -> None:
        super().__init__()
        self.product, self.order = product, order
        self.kept_as = f"{product.kept_as}, inputs reordered"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.product(rows[:, self.order])
        return out


class GroupedProduct(nn.Module):
    """The matmul by Pagemill's CUDA kernel: 4-bit or 8-bit weights are dequantized in registers."""

    def __init__(self, weight: TiledWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes, self.scales, self.zeros, self.order = (
            weight.codes,
            weight.scales,
            weight.zeros,
            weight.order,
        )
        self.bias = bias
        self._weight = weight
        self.kept_as = f"{weight.bits}-bit numbers, widened in the product"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        if self.order is not None:
            rows = rows[:, self.order]
        out = dispatch.grouped_matmul(rows, self._weight)
        return out if self.bias is None else out.add_(self.bias)


class ScaledProduct(nn.Module):
    """The matmul of 8-bit values, int8 or e4m3: a scale per output, and one per row of activations.

    Activations are rounded to the weight's dtype (`pagemill.kernels.row_scaled`), here or by the preceding kernel.
    """

    def __init__(self, weight: ScaledRows, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.numbers, self.scales, self.bias = weight.numbers, weight.scales, bias
        self._weight = weight
        self.rounds_to = weight.numbers.dtype
        self.kept_as: str | None = None
        """The stored form of a quantized checkpoint's weights, if it is preserved."""

    @classmethod
    def rounding(cls, weight: torch.Tensor, bias: torch.Tensor | None, numbers: torch.dtype) -> ScaledProduct:
        """Return the matmul of a weight that is rounded to this dtype."""
        return cls(dispatch.quantize_rows(weight.contiguous(), numbers), bias)

    @classmethod
    def of_float8(cls, weight: GroupedWeight, bias: torch.Tensor | None, dtype: torch.dtype) -> ScaledProduct:
        """Return the matmul of a checkpoint's unchanged e4m3 values, for which `has_row_scales` is True."""
        rows = ScaledRows(weight.codes.contiguous(), weight.scales.reshape(-1).contiguous(), dtype)
        product = cls(rows, bias)
        product.kept_as = "8-bit floats, activations rounded to 8-bit floats"
        return product

    def forward(self, rows: torch.Tensor | ScaledRows) -> torch.Tensor:
        if isinstance(rows, torch.Tensor):
            rows = dispatch.quantize_rows(rows, self.rounds_to)
        return dispatch.scaled_matmul(rows, self._weight, self.bias)


def has_row_scales(weight: GroupedWeight) -> bool:
    """Return True for e4m3 values with a scale per output."""
    return weight.codes.dtype is torch.float8_e4m3fn and weight.scales.shape[1] == 1 and weight.order is None


def rounded_product(
    weights: Sequence[Weight], bias: torch.Tensor | None, device: torch.device, numbers: torch.dtype
) -> ScaledProduct:
    """Return the matmul of weights rounded to int8 or e4m3; a checkpoint's e4m3 values are not rounded again."""
    bias = None if bias is None else bias.to(device)
    whole = grouped(weights) if numbers is torch.float8_e4m3fn else None
    if whole is not None and has_row_scales(whole):
        return ScaledProduct.of_float8(whole.to(device), bias, weights[0].dtype)
    return ScaledProduct.rounding(dense(weights).to(device), bias, numbers)


def cuda_product(
    weights: Sequence[Weight], bias: torch.Tensor | None, device: torch.device, *, has_float8: bool
) -> nn.Module:
    """Return the matmul on a GPU; weights with unsupported groups are dequantized.

    Args:
        has_float8: the GPU multiplies e4m3 values.
    """
    bias = None if bias is None else bias.to(device)
    whole = grouped(weights)
    if whole is not None and has_float8 and _multiplies_as_float8(whole, weights[0].dtype):
        return ScaledProduct.of_float8(whole.to(device), bias, weights[0].dtype)
    tiled = None if whole is None else TiledWeight.from_weight(whole.to(device))
    return DenseProduct(dense(weights).to(device), bias) if tiled is None else GroupedProduct(tiled, bias)


def _multiplies_as_float8(weight: GroupedWeight, dtype: torch.dtype) -> bool:
    """Return True if the library's matmul supports a checkpoint's values; otherwise activations are not rounded."""
    is_aligned = not any(size % _FLOAT8_MULTIPLE for size in weight.shape)
    return has_row_scales(weight) and dtype is torch.bfloat16 and is_aligned
