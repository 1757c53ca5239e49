"""Memory bandwidth and compute rate of this CPU, measured in about a second."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from pagemill.engine.layers.linear import OneDNNProduct

_READ_BYTES = 256 << 20
"""Larger than any cache."""
_TOKENS, _SIDE = 512, 1024
_ROUNDS = 7


@dataclass(frozen=True, slots=True)
class CpuSpeed:
    """Medians of several rounds: on a shared machine single ones differ by half."""

    bytes_per_s: float
    flops: float
    """Rate in matmuls of fp32 matrices."""
    spread: float
    """The slowest round's time over the fastest's: 1.0 on an idle machine."""
    threads: int


def measure_cpu(clock: Callable[[], float] = time.perf_counter) -> CpuSpeed:
    """`clock`: `time.process_time`, with one thread, excludes the time of other processes."""
    values = torch.ones(_READ_BYTES // 4)
    rows, multiply = torch.randn(_TOKENS, _SIDE), _product(torch.randn(_SIDE, _SIDE))
    with torch.inference_mode():
        read = _times(lambda: values.sum(), clock)
        product = _times(lambda: multiply(rows), clock)
    return CpuSpeed(
        bytes_per_s=_READ_BYTES / statistics.median(read),
        flops=2 * _TOKENS * _SIDE**2 / statistics.median(product),
        spread=max(max(read) / min(read), max(product) / min(product)),
        threads=torch.get_num_threads(),
    )


def _product(weight: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return oneDNN's matmul: no compilation, and about as fast as `kernels.cpu`; torch may be half as fast."""
    if torch._C._has_mkldnn:
        return OneDNNProduct(weight, None, row_invariant=False)
    return lambda rows: rows @ weight


def _times(work: Callable[[], object], clock: Callable[[], float]) -> list[float]:
    work()
    found = []
    for _ in range(_ROUNDS):
        began = clock()
        work()
        found.append(clock() - began)
    return found
