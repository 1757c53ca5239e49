"""GGUF's blocks: low-bit values along a row, each block with its scales.

Source: ggml's ggml-common.h and ggml-quants.c. Values are bit-identical to those of the package gguf (`gguf.quants`):
the product of a scale and a code is exact in fp32, and an offset is added with one rounding.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from pagemill.engine.layers.quantized_weight import QuantizedWeight
from pagemill.engine.models.formats.gguf_tensors import METHOD, Contents
from pagemill.engine.models.mapped_pages import drop_pages
from pagemill.engine.models.quantized.scheme import Parts, Scheme
from pagemill.kernels.types.grouped_weight import GroupedWeight

_EXPERT = re.compile(r"\.experts\.\d+\.")
_IQ4_NUMBERS = torch.tensor(
    [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], dtype=torch.int8
)


class Gguf(Scheme):
    method, main, parts = METHOD, "weight", ("weight",)
    has_quantized_tensors = False

    def __init__(self, config: Mapping[str, Any]) -> None:
        self._contents = Contents.from_config(config)

    def describe(self) -> str:
        counts = Counter(entry.type for entry in self._contents.entries.values())
        return f"{self.method}: {', '.join(f'{count} of {name}' for name, count in sorted(counts.items()))}"

    def is_quantized(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        return "weight" in tensors and tensors["weight"].dtype is torch.uint8

    def weight(self, parts: Parts) -> QuantizedWeight:
        blocks = parts.take("weight", (torch.uint8,), (None, None))
        name = f"{parts.module}.weight"
        entry = self._contents.entries.get(name) or self._contents.entries[_EXPERT.sub(".experts.*.", name)]
        order = None if entry.order is None else torch.tensor(self._contents.orders[entry.order])

        def read() -> GroupedWeight | torch.Tensor:
            rows = blocks if order is None else blocks[order]
            weight = _DECODERS.get(entry.type, _decoder_of_gguf(entry.type))(rows)
            drop_pages(blocks)
            return weight

        return parts.weight(len(blocks), entry.columns, read)


def _decoder_of_gguf(kind: str) -> Callable[[torch.Tensor], torch.Tensor]:
    def decode(rows: torch.Tensor) -> torch.Tensor:
        import gguf

        numbers = gguf.dequantize(rows.numpy(), gguf.GGMLQuantizationType[kind])
        return torch.from_numpy(np.ascontiguousarray(numbers))

    return decode


def _blocks(rows: torch.Tensor, *sizes: int) -> list[torch.Tensor]:
    """Split every block into parts of these bytes: uint8 [rows, blocks, size] each."""
    blocks, ends = rows.view(len(rows), -1, sum(sizes)), list(accumulate(sizes))
    return [blocks[:, :, end - size : end] for size, end in zip(sizes, ends, strict=True)]


def _in_rows(numbers: torch.Tensor, size: int) -> torch.Tensor:
    """Return [rows, blocks, any] as [rows, blocks, any / size, size]."""
    return numbers.reshape(*numbers.shape[:2], -1, size)


def _halves(scales: torch.Tensor) -> torch.Tensor:
    """Return the fp16 values of [rows, blocks, 2 * count] as fp32 [rows, blocks, count]."""
    return scales.contiguous().view(torch.float16).float()


def _nibbles(codes: torch.Tensor) -> torch.Tensor:
    """Return [..., 2 * count] from bytes [..., count]: the low halves, then the high ones."""
    return torch.cat([codes & 15, codes >> 4], dim=-1)


def _fifth_bits(bits: torch.Tensor) -> torch.Tensor:
    """Return 16 or 0 for each of the 32 bits of [rows, blocks, 4], lowest first."""
    places = torch.arange(8, dtype=torch.uint8)
    return ((bits[..., None] >> places) & 1).flatten(2) << 4


def _q4_0(rows: torch.Tensor) -> GroupedWeight:
    scale, codes = _blocks(rows, 2, 16)
    scales = _halves(scale).flatten(1)
    return GroupedWeight(
        _nibbles(codes).flatten(1), scales, torch.full_like(scales, 8, dtype=torch.int16), bits=4
    )


def _q4_1(rows: torch.Tensor) -> GroupedWeight:
    scale, offset, codes = _blocks(rows, 2, 2, 16)
    return _with_offsets(_nibbles(codes), _halves(scale), _halves(offset), bits=4)


def _q5_0(rows: torch.Tensor) -> GroupedWeight:
    scale, bits, codes = _blocks(rows, 2, 4, 16)
    numbers = (_nibbles(codes) | _fifth_bits(bits)).view(torch.int8) - 16
    return GroupedWeight(numbers.flatten(1), _halves(scale).flatten(1))


def _q5_1(rows: torch.Tensor) -> GroupedWeight:
    scale, offset, bits, codes = _blocks(rows, 2, 2, 4, 16)
    return _with_offsets(_nibbles(codes) | _fifth_bits(bits), _halves(scale), _halves(offset), bits=8)


def _q8_0(rows: torch.Tensor) -> GroupedWeight:
    scale, codes = _blocks(rows, 2, 32)
    return GroupedWeight(codes.contiguous().view(torch.int8).flatten(1), _halves(scale).flatten(1))


def _iq4_nl(rows: torch.Tensor) -> GroupedWeight:
    scale, codes = _blocks(rows, 2, 16)
    return GroupedWeight(_IQ4_NUMBERS[_nibbles(codes).flatten(1).int()], _halves(scale).flatten(1))


def _q4_k(rows: torch.Tensor) -> GroupedWeight:
    scale, offset, parts, codes = _blocks(rows, 2, 2, 12, 128)
    scales, offsets = _scales_of_k(scale, offset, parts)
    return _with_offsets(_nibbles(_in_rows(codes, 32)), scales, offsets, bits=4)


def _q5_k(rows: torch.Tensor) -> GroupedWeight:
    scale, offset, parts, bits, codes = _blocks(rows, 2, 2, 12, 32, 128)
    scales, offsets = _scales_of_k(scale, offset, parts)
    low = _in_rows(_nibbles(_in_rows(codes, 32)).flatten(2), 32)  # [rows, blocks, 8, 32]
    high = ((bits[:, :, None] >> torch.arange(8, dtype=torch.uint8)[:, None]) & 1) << 4
    return _with_offsets(low | high, scales, offsets, bits=8)


def _q6_k(rows: torch.Tensor) -> GroupedWeight:
    low, high, parts, scale = _blocks(rows, 128, 64, 16, 2)
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8)[:, None]
    fours = _nibbles(_in_rows(low, 64)).flatten(2)
    twos = (((_in_rows(high, 32)[:, :, :, None] >> shifts) & 3) << 4).flatten(2)
    numbers = (fours | twos).view(torch.int8) - 32
    scales = _halves(scale) * parts.contiguous().view(torch.int8).float()
    return GroupedWeight(numbers.flatten(1), scales.flatten(1))


def _scales_of_k(
    scale: torch.Tensor, offset: torch.Tensor, parts: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return scales and offsets [rows, blocks, 8]: 6-bit multiples of a block's scale and offset."""
    first, second, mixed = parts[:, :, :4], parts[:, :, 4:8], parts[:, :, 8:]
    scales = torch.cat([first & 63, (mixed & 15) | ((first >> 2) & 48)], dim=2)
    offsets = torch.cat([second & 63, (mixed >> 4) | ((second >> 2) & 48)], dim=2)
    return _halves(scale) * scales.float(), -(_halves(offset) * offsets.float())


def _with_offsets(
    codes: torch.Tensor, scales: torch.Tensor, offsets: torch.Tensor, bits: int
) -> GroupedWeight:
    return GroupedWeight(codes.flatten(1), scales.flatten(1), bits=bits, offsets=offsets.flatten(1))


_DECODERS: Mapping[str, Callable[[torch.Tensor], GroupedWeight | torch.Tensor]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
    "Q4_K": _q4_k,
    "Q5_K": _q5_k,
    "Q6_K": _q6_k,
    "IQ4_NL": _iq4_nl,
}
"""Types with a decoder here; other types use the package's slower decoders."""
