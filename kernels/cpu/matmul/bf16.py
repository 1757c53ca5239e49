"""Matmuls with a bfloat16 weight matrix, packed once: y = x W^T + b. x is rounded on the fly.

The product of two bfloat16 values is exact in fp32. Each value of the result is therefore one chain of fp32
additions over the inputs, the second of every pair before the first. It depends only on its row and channel,
to the last bit, regardless of the number of rows or threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch

from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.matmul.bf16_tile import GROUP, IS_NATIVE, PAIR, PAIRS
from pagemill.kernels.cpu.matmul.converted import PackedPanels, multiply_packed
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.kinds import BFLOATS

_ONLY_FORMAT = 0
_PACKED_AT_ONCE = 1 << 22  # weights; packing copies them


def is_native() -> bool:
    """Return True if this CPU multiplies bfloat16 values (AVX-512 BF16)."""
    return IS_NATIVE


def pack(weight: torch.Tensor) -> PackedPanels:
    """Pack a weight [out_features, in_features] as panels [num_panels, num_groups, pairs, PANEL, 2] in bfloat16.

    Values are rounded to nearest, and panels padded with zeros.
    """
    out_features, in_features = weight.shape
    num_panels, num_groups = -(-out_features // PANEL), -(-in_features // GROUP)
    packed = torch.empty(num_panels, num_groups, PAIRS, PANEL, PAIR, dtype=torch.bfloat16)
    advise_huge_pages(packed)
    at_once = max(1, _PACKED_AT_ONCE // (PANEL * in_features))
    for first in range(0, num_panels, at_once):
        channels = weight[first * PANEL : (first + at_once) * PANEL].to(torch.bfloat16)
        padding = (0, -in_features % GROUP, 0, -len(channels) % PANEL)
        pairs = torch.nn.functional.pad(channels, padding).view(-1, PANEL, num_groups, PAIRS, PAIR)
        packed[first : first + at_once] = pairs.permute(0, 2, 3, 1, 4)
    return PackedPanels(packed, _ONLY_FORMAT)


def pack_each(read: Callable[[int], torch.Tensor], count: int) -> PackedPanels:
    """`pack` `count` weights of one shape, read one at a time. Returns the panels of all, [count, ...]."""
    first = pack(read(0)).panels
    panels = first.new_empty(count, *first.shape)
    panels[0] = first
    for index in range(1, count):
        panels[index] = pack(read(index)).panels
    return PackedPanels(panels, _ONLY_FORMAT)


def multiply(x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times `pack`ed weights, plus bias [num_panels * PANEL]; new and contiguous."""
    assert packed.panels.shape[1] == -(-x.shape[1] // GROUP)
    return multiply_packed(BFLOATS, x, packed, bias, out_features)


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL), 1)
