"""Device time of one call, without the host's share; and a replacement for runs without a device."""

from __future__ import annotations

import time
from collections.abc import Callable
from itertools import pairwise
from statistics import median

import torch


def median_seconds(run: Callable[[], object], *, repeats: int = 20) -> float:
    """Return the median time of `run` on the GPU, replayed from a CUDA graph to exclude launch costs.

    `run` is called three times before the capture, to compile kernels and build host-side lists.
    """
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    make = torch.cuda.Event
    marks = [make(enable_timing=True) for _ in range(repeats + 1)]  # type: ignore[no-untyped-call]
    marks[0].record()
    for mark in marks[1:]:
        graph.replay()
        mark.record()
    torch.cuda.synchronize()
    return float(median(start.elapsed_time(end) for start, end in pairwise(marks)) / 1e3)


def host_seconds(run: Callable[[], object]) -> float:
    """Return the time of one call by the host's clock: meaningless, but never 0."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started
