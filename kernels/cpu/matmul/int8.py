"""Products with a weight matrix of 8-bit integers, packed once: y = x W^T + b, with x quantised as it arrives.

What is computed is defined in `pagemill.kernels.grouped_int8`: sums within a group of inputs are integers, hence exact,
and over the groups each number of the result is one chain of fp32 multiply-adds in the groups' order. So it depends on
its row and its channel alone, to the last bit, whatever the number of rows or threads and whatever the CPU.
"""

from __future__ import annotations

from functools import cache

import torch

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.jit.row import F32
from pagemill.kernels.cpu.matmul.converted_product import multiply_packed
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.int8_tile import PANEL_BYTES, QUAD, QUADS, WEIGHT_BYTES, ZERO_POINT
from pagemill.kernels.cpu.matmul.kinds import INTEGERS

_PACKED_AT_ONCE = 1 << 22  # weights: packing makes several copies of them


def pack(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [num_panels, num_groups, bytes] of a weight [out_features, in_features], ends filled up with zeros."""
    out_features, in_features = weight.shape
    num_panels, num_groups = -(-out_features // PANEL), grouped_int8.num_groups(in_features)
    packed = torch.empty(num_panels, num_groups, PANEL_BYTES, dtype=torch.uint8)
    advise_huge_pages(packed)
    at_once = max(1, _PACKED_AT_ONCE // (PANEL * in_features))
    for first in range(0, num_panels, at_once):
        channels = weight[first * PANEL : (first + at_once) * PANEL]
        numbers, scales = grouped_int8.quantise(
            torch.nn.functional.pad(channels, (0, 0, 0, -len(channels) % PANEL))
        )
        target = packed[first : first + at_once]
        quads = (numbers.to(torch.int16) + ZERO_POINT).to(torch.uint8)
        quads = quads.view(-1, PANEL, num_groups, QUADS, QUAD).permute(0, 2, 3, 1, 4)
        target[:, :, :WEIGHT_BYTES] = quads.reshape(-1, num_groups, WEIGHT_BYTES)
        scales = scales.view(-1, PANEL, num_groups).transpose(1, 2).contiguous()
        target[:, :, WEIGHT_BYTES:] = scales.view(torch.uint8).view(-1, num_groups, PANEL * F32)
    return packed


def multiply(x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times `pack`ed weights, plus bias [num_panels * PANEL]; fresh and contiguous."""
    assert packed.shape[1] == grouped_int8.num_groups(x.shape[1])
    return multiply_packed(INTEGERS, x, packed, bias, out_features)


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from the disk, so that no step pays for it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL), 1)
