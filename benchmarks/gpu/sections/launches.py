"""One launch of every kernel against fp64, and one captured graph: what has to work before anything is timed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from benchmarks.gpu import attention, row_kernels
from benchmarks.gpu.section import Bench, Row
from pagemill.kernels.types.layer_cache import FP8

# Split decode and prefill; the same over fp8; rows enough that none is split.
CASES: list[Any] = [
    (([1, 1, 40], [700, 33, 300]), attention.LLAMA_8B, {}),
    (([1, 1, 40], [700, 33, 300]), attention.LLAMA_8B, {"cache_dtype": FP8}),
    (([1] * 80, [20] * 80), attention.LLAMA_8B, {}),
]
TINY_CASES: list[Any] = [(([1, 3], [20, 9]), attention.TOY, {})]


def run(bench: Bench) -> Iterator[Row]:
    cases, sizes = (
        (TINY_CASES, row_kernels.TOY_SIZES) if bench.is_tiny else (CASES, row_kernels.LAUNCHED_SIZES)
    )
    dtype = torch.float32 if bench.is_tiny else torch.bfloat16
    yield from attention.correctness(bench, cases, [dtype])
    yield from row_kernels.correctness(bench, sizes, [dtype])
    workload = attention.make_workload(bench, attention.TOY, [(1, 40), (1, 7)])
    yield Row(case="a captured decode, replayed", measured=bench.measure(workload.run), ok=True)
