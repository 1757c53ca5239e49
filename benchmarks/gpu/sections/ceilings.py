"""The rates that everything else is held against: a large copy, and large products of random numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from benchmarks.gpu.section import Bench, Row, Skipped
from pagemill.sizing.cards import CARDS

_COPY, _PRODUCT = 0.9, 0.8
"""Predicted shares of the data sheet's figures."""


def run(bench: Bench) -> Iterator[Row]:
    elements, side = (2**10, 32) if bench.is_tiny else (2**30, 8192)
    name = torch.cuda.get_device_name(bench.device).lower() if bench.device.type == "cuda" else ""
    sheet = next((card for card in CARDS.values() if card.name in name.replace("-", " ").split()), None)
    source = torch.empty(elements, dtype=torch.float32, device=bench.device).normal_()
    target = torch.empty_like(source)
    seconds = bench.measure(lambda: target.copy_(source))
    yield Row(
        case="copy",
        measured=2 * source.nbytes / seconds,
        unit="B/s",
        prediction=_COPY * sheet.bytes_per_s if sheet else None,
    )
    left, right = (torch.randn(side, side, device=bench.device).bfloat16() for _ in range(2))
    seconds = bench.measure(lambda: torch.mm(left, right))
    half = _PRODUCT * sheet.flops["bfloat16"] if sheet else None
    yield Row(case="bf16 product", measured=2 * side**3 / seconds, unit="FLOP/s", prediction=half)
    if bench.device.type == "cuda" and torch.cuda.get_device_capability(bench.device) < (8, 9):
        raise Skipped("fp8 products need compute capability 8.9")
    yield Row(
        case="fp8 product",
        measured=2 * side**3 / bench.measure(_fp8_product(left, right)),
        unit="FLOP/s",
        prediction=2 * half if half else None,
    )


def _fp8_product(left: torch.Tensor, right: torch.Tensor) -> Callable[[], torch.Tensor]:
    """Scaled by row and by column, as fp8 weights are."""
    fp8 = torch.float8_e4m3fn
    a, b = left.to(fp8), right.t().contiguous().to(fp8).t()
    scale_a, scale_b = (torch.ones(shape, device=left.device) for shape in ((len(left), 1), (1, len(left))))
    return lambda: torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=torch.bfloat16)
