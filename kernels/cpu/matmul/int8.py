"""Matmuls with a weight matrix of 8-bit or 4-bit integers, packed once: y = x W^T + b. x is quantized on the fly.

`pagemill.kernels.grouped_int8` defines the computation. Sums within a group of inputs are integers, hence
exact. Over the groups, each value of the result is one chain of fp32 multiply-adds in group order. It depends
only on its row and channel, to the last bit, regardless of the number of rows or threads and the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch

from pagemill.kernels import grouped_int8
from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.jit.row import F32
from pagemill.kernels.cpu.matmul import grids
from pagemill.kernels.cpu.matmul.converted import PackedPanels, multiply_packed
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.grouped_packing import padded, write_rows
from pagemill.kernels.cpu.matmul.int8_tile import (
    EIGHT_BITS,
    EIGHT_BITS_HALVES,
    FORMATS,
    FOUR_BITS_HALVES,
    FOUR_BITS_OFFSET,
    FOUR_BITS_OFFSET_HALVES,
    QUAD,
)
from pagemill.kernels.cpu.matmul.kinds import INTEGERS

GRIDS = {
    FOUR_BITS_HALVES: grids.SIGNED_NIBBLES,
    FOUR_BITS_OFFSET_HALVES: grids.OFFSET_NIBBLES,
    FOUR_BITS_OFFSET: grids.OFFSET_NIBBLES,
    EIGHT_BITS_HALVES: grids.SIGNED_BYTES,
    EIGHT_BITS: grids.SIGNED_BYTES,
}
SMALLEST_FIRST = tuple(sorted(GRIDS, key=lambda weight_format: FORMATS[weight_format].group_bytes))
_PACKED_AT_ONCE = 1 << 22  # weights; packing makes several copies of them


def pack(weight: torch.Tensor, formats: Sequence[int] = SMALLEST_FIRST) -> PackedPanels:
    """Pack a weight [out_features, in_features] in the first of these formats that is exact, or rounded to 8 bits."""
    weight_format, integers = _integers(weight, formats)
    out_features, num_groups = integers.scales.shape
    panels = torch.empty(
        -(-out_features // PANEL), num_groups, FORMATS[weight_format].group_bytes, dtype=torch.uint8
    )
    advise_huge_pages(panels)
    at_once = max(1, _PACKED_AT_ONCE // (PANEL * grouped_int8.GROUP * num_groups))
    for first in range(0, len(panels), at_once):
        channels = slice(first * PANEL, (first + at_once) * PANEL)
        part = grids.Integers(*(tensor[channels] for tensor in integers))
        _write(panels[first : first + at_once], weight_format, part)
    return PackedPanels(panels, weight_format)


def pack_each(read: Callable[[int], torch.Tensor], count: int) -> PackedPanels:
    """`pack` `count` weights of one shape in one format. They are read one at a time, some of them several times.

    Returns:
        The panels of all, [count, ...].
    """
    formats: Sequence[int] = SMALLEST_FIRST
    expert = 0
    panels = torch.empty(0)
    while expert < count:
        packed = pack(read(expert), formats)
        if packed.weight_format != formats[0]:  # all earlier weights are packed again
            formats = formats[formats.index(packed.weight_format) :]
            if expert > 0:
                expert = 0
                continue
        if expert == 0:
            panels = packed.panels.new_empty(count, *packed.panels.shape)
        panels[expert] = packed.panels
        expert += 1
    return PackedPanels(panels, formats[0])


def _integers(weight: torch.Tensor, formats: Sequence[int]) -> tuple[int, grids.Integers]:
    weight = weight.float()
    found: dict[int, grids.Integers | None] = {}
    for weight_format in formats:
        grid = GRIDS[weight_format]
        if grid not in found:
            found[grid] = grids.find(weight, grid)
        integers = found[grid]
        if integers is not None and (FORMATS[weight_format].factor_bytes == F32 or _are_halves(integers)):
            return weight_format, integers
    numbers, scales = grouped_int8.quantize(weight)
    return EIGHT_BITS, grids.Integers(numbers, scales, torch.zeros_like(scales))


def _are_halves(integers: grids.Integers) -> bool:
    return all(
        torch.equal(factors.half().float(), factors) for factors in (integers.scales, integers.offsets)
    )


def _write(panels: torch.Tensor, weight_format: int, integers: grids.Integers) -> None:
    form, (num_panels, num_groups, _) = FORMATS[weight_format], panels.shape
    numbers = (padded(integers.numbers.flatten(1)).to(torch.int16) + form.zero_point).to(torch.uint8)
    lines = numbers.view(num_panels, PANEL, num_groups, form.weight_lines, form.quads_per_line, QUAD)
    lines = lines[..., 0, :] | lines[..., 1, :] << 4 if form.quads_per_line == 2 else lines[..., 0, :]
    at = form.factors_at
    panels[:, :, :at] = lines.permute(0, 2, 3, 1, 4).reshape(num_panels, num_groups, at)
    dtype = torch.float32 if form.factor_bytes == F32 else torch.float16
    for factors in (integers.scales, integers.offsets)[: form.num_factors]:
        write_rows(panels[:, :, at : at + form.row_bytes], factors.to(dtype))
        at += form.row_bytes


def multiply(x: torch.Tensor, packed: PackedPanels, bias: torch.Tensor, out_features: int) -> torch.Tensor:
    """x [num_rows, in_features] fp32 times `pack`ed weights, plus bias [num_panels * PANEL]; new and contiguous."""
    assert packed.panels.shape[1] == grouped_int8.num_groups(x.shape[1])
    return multiply_packed(INTEGERS, x, packed, bias, out_features)


@cache
def warm_up() -> None:
    """Compile the kernel, or load it from disk, before a step needs it."""
    multiply(torch.zeros(1, 1), pack(torch.zeros(1, 1)), torch.zeros(PANEL), 1)
