"""The correctness section of `benchmarks.gpu`: all kernels, spread over processes.

Most of its time is compilation, which the other sections find done in Triton's cache on the disk.
"""

from __future__ import annotations

import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch

from benchmarks import gpu_attention, gpu_rows

Row = dict[str, Any]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PROCESSES = 12


def run(device: torch.device, *, is_dry: bool) -> list[Row]:
    """One row per case; those that are wrong first."""
    if is_dry:
        shape = gpu_attention.Shape("toy", 2, 1, 64)
        cases: list[Any] = [(([1, 3], [20, 9]), shape, {})]
        rows = gpu_attention.correctness(device, cases, [torch.float32])
        rows += gpu_rows.correctness(device, gpu_rows.TOY_SIZES, [torch.float32])
    else:
        jobs = [(number, dtype) for number in range(len(gpu_attention.EVERY_CASE)) for dtype in _DTYPES]
        processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
        # Spawned: a process that has used CUDA can't be forked.
        with ProcessPoolExecutor(processes, multiprocessing.get_context("spawn")) as pool:
            others = [pool.submit(_check_rows, str(device), dtype) for dtype in _DTYPES]
            speeds = pool.submit(_compile_the_rest, str(device))
            rows = [row for found in pool.map(_check_attention, jobs) for row in found]
            rows += [row for other in others for row in other.result()]
            speeds.result()
    return sorted(rows, key=lambda row: row["ok"])


def _check_attention(job: tuple[int, torch.dtype]) -> list[Row]:
    number, dtype = job
    return gpu_attention.correctness(torch.device("cuda"), [gpu_attention.EVERY_CASE[number]], [dtype])


def _check_rows(device: str, dtype: torch.dtype) -> list[Row]:
    return gpu_rows.correctness(torch.device(device), dtypes=[dtype])


def _compile_the_rest(device: str) -> None:
    """Launch what the timed sections launch, once."""

    def once(run: Any) -> float:
        run()
        return 1.0

    gpu_rows.speed(torch.device(device), once, None)
