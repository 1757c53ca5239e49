"""Pack weight matrices for `fp32.py`, in the fewest bits that reproduce every value.

Decoding reads all weights for every token, and is limited by memory bandwidth. Few checkpoints hold 32 bits
of information per weight: most store 16-bit floats, or 4-bit or 8-bit integers with scales, dequantized at
load time. This module reverses that for any file format. A matrix is kept as integers (`grids`) or 16-bit
floats only if every value is reproduced exactly (a zero may lose its sign). Matmuls still compute in fp32.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from pagemill.kernels.cpu.jit.compiler import f32_pointer, i8_pointer, i32_pointer, jit, use_torch_threads
from pagemill.kernels.cpu.jit.memory import advise_huge_pages
from pagemill.kernels.cpu.jit.row import F32, VECTOR, ZERO, address_of, fill
from pagemill.kernels.cpu.jit.threads import launch_rows
from pagemill.kernels.cpu.jit.vector import F32X16, LANES, call
from pagemill.kernels.cpu.matmul.fp32_tile import PANEL
from pagemill.kernels.cpu.matmul.grids import OFFSET_NIBBLES, SIGNED_BYTES, fit_group
from pagemill.kernels.cpu.matmul.weight_formats import (
    BFLOAT16,
    BYTE_CODES,
    BYTES,
    BYTES_GROUP,
    FLOAT16,
    FLOAT32,
    GROUP,
    NIBBLE_CODES,
    NIBBLES,
    NIBBLES_GROUP,
    ROW,
    WORD_INPUTS,
    expand,
    panel_bytes,
)

SMALLEST_FIRST = (NIBBLES, BYTES, BFLOAT16, FLOAT16)

_ir = cgutils.ir
_I64 = _ir.IntType(64)
_F16X16 = _ir.VectorType(_ir.HalfType(), LANES)


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """A weight [out_features, in_features] in panels, padded with zeros."""

    panels: torch.Tensor
    """uint8 [num_panels, bytes]"""
    weight_format: int
    out_features: int
    in_features: int

    def of_channels(self, channels: torch.Tensor) -> torch.Tensor:
        """Return the weights of these channels, fp32 [num_channels, in_features]."""
        panels = self.panels[channels // PANEL].contiguous()
        if self.weight_format == FLOAT32:
            numbers = panels.view(torch.float32).view(-1, self.in_features, PANEL)
        else:
            numbers = torch.empty(len(panels), self.in_features, PANEL)
            _expand_panels(
                self.weight_format, panels.data_ptr(), len(panels), self.in_features, numbers.data_ptr()
            )
        return numbers[torch.arange(len(channels)), :, channels % PANEL]


def pack(weight: torch.Tensor, formats: Sequence[int] = SMALLEST_FIRST) -> PackedWeight:
    """Pack a weight [out_features, in_features], fp32, in the first of these formats that is exact, or FLOAT32."""
    return pack_merged([weight], formats)


def pack_merged(weights: Sequence[torch.Tensor], formats: Sequence[int] = SMALLEST_FIRST) -> PackedWeight:
    """`pack` weights [any, in_features], stacked as one; they are copied only if two of them share a panel."""
    if any(len(weight) % PANEL for weight in weights[:-1]):
        weights = [torch.cat(list(weights))]
    weights = [weight.contiguous() for weight in weights]
    out_features, in_features = sum(map(len, weights)), weights[0].shape[1]
    panels, weight_format = _pack_parts(lambda: weights, -(-out_features // PANEL), in_features, formats)
    return PackedWeight(panels, weight_format, out_features, in_features)


def pack_each(
    read: Callable[[int], torch.Tensor],
    count: int,
    shape: tuple[int, int],
    formats: Sequence[int] = SMALLEST_FIRST,
) -> PackedWeight:
    """Pack `count` weights of one shape in one format; each starts at a new panel, and is read separately.

    Returns:
        The sizes of one weight, and the panels of all.
    """
    num_panels = -(-shape[0] // PANEL)

    def parts() -> Iterator[torch.Tensor]:
        return (read(index).float().contiguous() for index in range(count))

    panels, weight_format = _pack_parts(parts, count * num_panels, shape[1], formats)
    return PackedWeight(panels, weight_format, *shape)


def _pack_parts(
    parts: Callable[[], Iterable[torch.Tensor]], num_panels: int, in_features: int, formats: Sequence[int]
) -> tuple[torch.Tensor, int]:
    """Return the panels of weights [any, in_features] and their format. Each weight starts a panel."""
    for weight_format in (*formats, FLOAT32):
        if weight_format in (NIBBLES, BYTES) and in_features % GROUP:
            continue
        panels = torch.empty(num_panels, panel_bytes(weight_format, in_features), dtype=torch.uint8)
        advise_huge_pages(panels)
        if _all_fit(weight_format, parts(), in_features, panels):
            return panels, weight_format
    raise AssertionError("every number fits itself")


def _all_fit(
    weight_format: int, parts: Iterable[torch.Tensor], in_features: int, panels: torch.Tensor
) -> bool:
    misfits = np.zeros(1, np.int64)
    target = panels.data_ptr()
    for weight in parts:
        _pack_parallel(
            weight_format, weight.data_ptr(), len(weight), in_features, target, misfits, use_torch_threads()
        )
        if misfits[0]:
            return False
        target += panels.stride(0) * -(-len(weight) // PANEL)
    return True


@jit
def _expand_panels(weight_format, panels, count, in_features, target):
    size = panel_bytes(weight_format, in_features)
    for panel in range(count):
        expand(weight_format, panels + panel * size, 0, in_features, target + panel * in_features * ROW)


@intrinsic
def _fits_halves(typing_context: Any, source: Any, halves: Any) -> Any:
    """Write the 16 floats at `source` as fp16 to `halves`; return 1 if they are equal."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        source, halves = arguments
        numbers = builder.load(builder.inttoptr(source, F32X16.as_pointer()), align=4)
        rounded = builder.fptrunc(numbers, _F16X16)
        builder.store(rounded, builder.inttoptr(halves, _F16X16.as_pointer()), align=2)
        same = builder.fcmp_ordered("==", builder.fpext(rounded, F32X16), numbers)
        return builder.zext(call(builder, "llvm.vector.reduce.and.v16i1", _ir.IntType(1), [same]), _I64)

    return types.int64(types.int64, types.int64), generate


@jit
def _place_nibbles(codes, channel, target):
    """Write a channel's 32 values into their bits of a zero-initialized group."""
    for i in range(GROUP):
        word = (channel // LANES * GROUP // WORD_INPUTS + i // WORD_INPUTS) * LANES + channel % LANES
        i32_pointer(target)[word] |= np.int32(i8_pointer(codes)[i]) << (4 * (i % WORD_INPUTS))


@jit
def _pack_group(weight_format, source, stride, num_channels, target, scratch):
    """Pack GROUP inputs of a panel as integers; return False if they do not fit. `stride` of channels is in bytes."""
    codes = scratch + VECTOR
    is_nibbles = weight_format == NIBBLES
    size = NIBBLES_GROUP if is_nibbles else BYTES_GROUP
    fill(target, size // F32, ZERO)
    scales = target + (NIBBLE_CODES if is_nibbles else BYTE_CODES)
    for channel in range(num_channels):
        grid = OFFSET_NIBBLES if is_nibbles else SIGNED_BYTES
        scale, offset = fit_group(grid, source + channel * stride, codes, scratch)
        if scale == ZERO:
            return False
        f32_pointer(scales)[channel] = scale
        if is_nibbles:
            f32_pointer(scales + ROW)[channel] = offset
            _place_nibbles(codes, channel, target)
        else:
            for i in range(GROUP):
                i8_pointer(target)[i * PANEL + channel] = i8_pointer(codes)[i]
    return True


@jit
def _pack_integers(weight_format, source, in_features, num_channels, target, scratch):
    size = NIBBLES_GROUP if weight_format == NIBBLES else BYTES_GROUP
    for group in range(in_features // GROUP):
        at = source + F32 * GROUP * group
        if not _pack_group(
            weight_format, at, F32 * in_features, num_channels, target + size * group, scratch
        ):
            return False
    return True


@jit
def _pack_bfloats(source, in_features, num_channels, target):
    fill(target, in_features * LANES, ZERO)
    for channel in range(num_channels):
        bits, words = i32_pointer(source + F32 * in_features * channel), i32_pointer(target)
        for i in range(in_features):
            number = bits[i]
            if number & 0xFFFF:
                return False
            # Infinities and NaNs keep their bits.
            words[i * LANES + channel % LANES] |= number if channel >= LANES else (number >> 16) & 0xFFFF
    return True


@jit
def _pack_floats(source, in_features, num_channels, target):
    if num_channels < PANEL:
        fill(target, in_features * PANEL, ZERO)
    for first in range(0, in_features, LANES):
        for channel in range(num_channels):
            numbers = f32_pointer(source + F32 * in_features * channel)
            for i in range(first, min(first + LANES, in_features)):
                f32_pointer(target)[i * PANEL + channel] = numbers[i]


@jit
def _pack_halves(source, in_features, num_channels, target, scratch):
    fill(scratch, PANEL, ZERO)
    for i in range(in_features):
        for channel in range(num_channels):
            f32_pointer(scratch)[channel] = f32_pointer(source + F32 * in_features * channel)[i]
        for half in range(0, PANEL, LANES):
            if not _fits_halves(scratch + F32 * half, target + (i * PANEL + half) * 2):
                return False
    return True


@jit
def _pack_panel(weight_format, source, in_features, num_channels, target, scratch):
    """Return True if the format reproduces every value of up to PANEL consecutive channels."""
    if weight_format == FLOAT32:
        _pack_floats(source, in_features, num_channels, target)
        return True
    if weight_format == BFLOAT16:
        return _pack_bfloats(source, in_features, num_channels, target)
    if weight_format == FLOAT16:
        return _pack_halves(source, in_features, num_channels, target, scratch)
    return _pack_integers(weight_format, source, in_features, num_channels, target, scratch)


@jit(allocates=True)
def _pack_panels(first, last, weight_format, weight, out_features, in_features, panels, misfits):
    size, scratch = panel_bytes(weight_format, in_features), np.empty(2 * PANEL, np.float32)
    for panel in range(first, last):
        if misfits[0] == 0:
            source = weight + F32 * PANEL * in_features * panel
            num_channels = min(PANEL, out_features - PANEL * panel)
            target = panels + size * panel
            if not _pack_panel(weight_format, source, in_features, num_channels, target, address_of(scratch)):
                misfits[0] = 1


@jit
def _pack_parallel(weight_format, weight, out_features, in_features, panels, misfits, num_threads):
    """Pack all panels; stop at the first misfit, which every thread checks before its next panel."""
    num_panels = (out_features + PANEL - 1) // PANEL
    arguments = (weight_format, weight, out_features, in_features, panels, misfits)
    launch_rows(_pack_panels, num_threads, num_panels, arguments)
