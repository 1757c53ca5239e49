"""Pack quantized checkpoint weights directly, without dequantizing them first.

`weight_packing` finds such integers in fp32 matrices; here they are known. A format is used only if every
weight equals the result of `GroupedWeight.dequantize` to the last bit.
"""

from __future__ import annotations

import torch

from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.weight_formats import (
    BYTE_CODES,
    BYTES,
    FLOAT8,
    GROUP,
    NIBBLE_CODES,
    NIBBLES,
    ROW,
    WORD_INPUTS,
    panel_bytes,
)
from pagemill.kernels.cpu.matmul.weight_packing import PackedWeight
from pagemill.kernels.types.grouped_weight import GroupedWeight

_HALVES = PANEL // 16
_FLOAT8_SCALE = 256.0


def pack_grouped(weight: GroupedWeight) -> PackedWeight | None:
    """Pack a weight in the smallest format that holds it; None if none does. Its input order is not packed."""
    if weight.group_size % GROUP:
        return None
    weight = weight.in_groups_of(GROUP)
    if weight.codes.dtype is torch.float8_e4m3fn:
        return _pack_float8(weight)
    if weight.bits == 4 and weight.codes.dtype is torch.uint8:
        offsets = _exact_offsets(weight)
        if offsets is not None:
            return _pack_nibbles(weight, offsets)
    return _pack_bytes(weight)


def _exact_offsets(weight: GroupedWeight) -> torch.Tensor | None:
    """Return the offsets if they are exact: number * scale + offset is then rounded once, like the weight."""
    if weight.offsets is not None:
        return weight.offsets if weight.zeros is None else None
    if weight.zeros is None:
        return torch.zeros_like(weight.scales)
    offsets = -(weight.zeros.double() * weight.scales.double())
    rounded = offsets.float()
    return rounded if torch.equal(rounded.double(), offsets) else None


def _pack_nibbles(weight: GroupedWeight, offsets: torch.Tensor) -> PackedWeight:
    panels, groups = _empty_panels(NIBBLES, weight)
    codes = padded(weight.codes).view(len(panels), _HALVES, 16, groups, -1, WORD_INPUTS)
    pairs = codes[..., 0::2] | (codes[..., 1::2] << 4)
    words = pairs.permute(0, 3, 1, 4, 2, 5).reshape(len(panels), groups, NIBBLE_CODES)
    by_group = panels.view(len(panels), groups, -1)
    by_group[:, :, :NIBBLE_CODES] = words
    write_rows(by_group[:, :, NIBBLE_CODES : NIBBLE_CODES + ROW], weight.scales)
    write_rows(by_group[:, :, NIBBLE_CODES + ROW :], offsets)
    return PackedWeight(panels, NIBBLES, *weight.shape)


def _pack_bytes(weight: GroupedWeight) -> PackedWeight | None:
    if weight.offsets is not None:
        return None
    numbers = weight.codes
    if weight.zeros is not None:
        wide = numbers.view(len(numbers), -1, GROUP).short() - weight.zeros[:, :, None]
        numbers = wide.view(numbers.shape)
    if numbers.dtype is not torch.int8:
        if numbers.numel() and (numbers.max() > 127 or numbers.min() < -128):
            return None
        numbers = numbers.to(torch.int8)
    return _pack_wide(BYTES, weight, numbers.view(torch.uint8), weight.scales)


def _pack_float8(weight: GroupedWeight) -> PackedWeight | None:
    scales = weight.scales * _FLOAT8_SCALE
    if not bool(scales.isfinite().all()):
        return None
    return _pack_wide(FLOAT8, weight, weight.codes.view(torch.uint8), scales)


def _pack_wide(
    weight_format: int, weight: GroupedWeight, codes: torch.Tensor, scales: torch.Tensor
) -> PackedWeight:
    panels, groups = _empty_panels(weight_format, weight)
    by_group = panels.view(len(panels), groups, -1)
    channels = padded(codes).view(len(panels), PANEL, groups, GROUP)
    by_group[:, :, :BYTE_CODES].view(len(panels), groups, GROUP, PANEL)[:] = channels.permute(0, 2, 3, 1)
    write_rows(by_group[:, :, BYTE_CODES:], scales)
    return PackedWeight(panels, weight_format, *weight.shape)


def _empty_panels(weight_format: int, weight: GroupedWeight) -> tuple[torch.Tensor, int]:
    out_features, in_features = weight.shape
    size = panel_bytes(weight_format, in_features)
    panels = torch.empty(-(-out_features // PANEL), size, dtype=torch.uint8)
    advise_huge_pages(panels)
    return panels, in_features // GROUP


def padded(rows: torch.Tensor) -> torch.Tensor:
    """Pad [out_features, any] with zeros to complete panels."""
    return torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PANEL)).contiguous()


def write_rows(target: torch.Tensor, numbers: torch.Tensor) -> None:
    """Write [out_features, groups] fp32 or fp16 to uint8 [num_panels, groups, bytes of a panel's]."""
    rows = padded(numbers).view(len(target), PANEL, -1).transpose(1, 2).contiguous()
    target.copy_(rows.view(torch.uint8))
