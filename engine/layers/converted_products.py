"""Matmuls by Pagemill's CPU kernels that convert their rows to 8-bit integers or to bfloat16."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

if TYPE_CHECKING:
    from pagemill.kernels.cpu.matmul.kinds import KindName


class ConvertedProduct(nn.Module):
    """A matmul of fp32 rows with weights of another format, with fp32 results."""

    kind: ClassVar[KindName]

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        super().__init__()
        from pagemill.kernels.cpu.matmul.fp32_tile import PANEL

        kernel = self.kernel()
        self.multiply, self.panel = kernel.multiply, PANEL
        self._out_features = len(weight)
        self.packed = kernel.pack(weight)
        self.panels: torch.Tensor = self.packed.panels
        self.bias = torch.zeros(len(self.panels) * self.panel)
        if bias is not None:
            self.bias[: self._out_features] = bias

    @staticmethod
    def kernel() -> Any:
        """Return the module with `pack`, `multiply` and `warm_up`."""
        raise NotImplementedError

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.multiply(rows.float(), self.packed, self.bias, self._out_features)
        return out

    def of_channels(self, channels: torch.Tensor) -> nn.Module:
        return _Channels(self, channels)


class PackedInt8Product(ConvertedProduct):
    """Matmul of 8-bit integers, on any CPU."""

    kind = "int8"

    @staticmethod
    def kernel() -> Any:
        from pagemill.kernels.cpu.matmul import int8

        return int8


class PackedBf16Product(ConvertedProduct):
    """Matmul of bfloat16 values, for CPUs that support it."""

    kind = "bf16"
    kept_as = "widened to bfloat16"
    """The form of a quantized checkpoint's weights."""

    @staticmethod
    def kernel() -> Any:
        from pagemill.kernels.cpu.matmul import bf16

        return bf16


class _Channels(nn.Module):
    """Some channels of a packed matmul: it multiplies by the complete panels that contain them."""

    def __init__(self, product: ConvertedProduct, channels: torch.Tensor) -> None:
        super().__init__()
        panels, places = torch.unique(channels // product.panel, return_inverse=True)
        self._multiply, self._packed = product.multiply, product.packed.some(panels)
        self.panels = self._packed.panels
        self._bias = product.bias.view(-1, product.panel)[panels].flatten()
        self._columns = places * product.panel + channels % product.panel

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._multiply(rows.float(), self._packed, self._bias, len(self._bias))
        return out[:, self._columns]
