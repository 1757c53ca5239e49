"""Products with the weights of a quantised checkpoint. Activations are not rounded, but by `Float8Product`."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from pagemill.engine.layers.linear import DenseProduct, PackedProduct
from pagemill.engine.layers.quantized_weight import Weight, dense, grouped
from pagemill.kernels import dispatch
from pagemill.kernels.types.grouped_weight import GroupedWeight
from pagemill.kernels.types.tiled_weight import TiledWeight

_FLOAT8_LIMIT = 448.0
_FLOAT8_SMALLEST_PEAK = 1e-10
_FLOAT8_MULTIPLE = 16


def packed_product(weights: Sequence[Weight], bias: torch.Tensor | None) -> nn.Module:
    """Return the CPU's product in fp32, from numbers of few bits where a lossless form of them is known."""
    whole = grouped(weights)
    if whole is None:
        return PackedProduct.of([dense([weight]) for weight in weights], bias)
    from pagemill.kernels.cpu.matmul.grouped_packing import pack_grouped

    packed = pack_grouped(whole)
    if packed is None:
        return PackedProduct.of([whole.dequantise()], bias)
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
    """A product whose weight has its inputs in another order (GPTQ's act-order), in which it adds them up."""

    def __init__(self, product: PackedProduct, order: torch.Tensor) -> None:
        super().__init__()
        self.product, self.order = product, order
        self.kept_as = f"{product.kept_as}, inputs reordered"

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.product(rows[:, self.order])
        return out


class GroupedProduct(nn.Module):
    """The product by our kernel for CUDA: numbers of 4 or 8 bits are widened in registers."""

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


class Float8Product(nn.Module):
    """The product by cuBLAS of e4m3 numbers, with a scale per output and one per row of activations.

    Activations are rounded to e4m3 as they arrive: what a checkpoint of these scales was made for.
    """

    kept_as = "8-bit floats, activations rounded to 8-bit floats"

    def __init__(self, weight: GroupedWeight, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes = weight.codes.contiguous().t()
        self.scales = weight.scales.view(1, -1).contiguous()
        self.bias = bias

    @staticmethod
    def supports(weight: GroupedWeight, dtype: torch.dtype) -> bool:
        """Return True for scales per output, sizes and an output dtype that the library's product takes."""
        return (
            weight.codes.dtype is torch.float8_e4m3fn
            and weight.scales.shape[1] == 1
            and dtype is torch.bfloat16
            and not any(size % _FLOAT8_MULTIPLE for size in weight.shape)
        )

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        peaks = rows.float().abs().amax(dim=1, keepdim=True).clamp(min=_FLOAT8_SMALLEST_PEAK)
        scales = peaks / _FLOAT8_LIMIT
        numbers = (rows.float() / scales).clamp(-_FLOAT8_LIMIT, _FLOAT8_LIMIT).to(torch.float8_e4m3fn)
        out: torch.Tensor = torch._scaled_mm(
            numbers, self.codes, scale_a=scales, scale_b=self.scales, out_dtype=torch.bfloat16
        )
        return out if self.bias is None else out.add_(self.bias)


def cuda_product(
    weights: Sequence[Weight], bias: torch.Tensor | None, device: torch.device, *, has_float8: bool
) -> nn.Module:
    """Return the product on a GPU; weights whose groups its kernel lacks are widened.

    Args:
        has_float8: the GPU multiplies e4m3 numbers.
    """
    bias = None if bias is None else bias.to(device)
    whole = grouped(weights)
    if whole is not None and has_float8 and Float8Product.supports(whole, weights[0].dtype):
        return Float8Product(whole.to(device), bias)
    tiled = None if whole is None else TiledWeight.of(whole.to(device))
    return DenseProduct(dense(weights).to(device), bias) if tiled is None else GroupedProduct(tiled, bias)
