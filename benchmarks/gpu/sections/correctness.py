"""Every kernel against fp64, spread over processes.

Most of its time is compilation, which the other sections find done in Triton's cache on the disk. A case that loses
its process the device takes the cases after it along: those are run again, each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.gpu import attention, row_kernels
from benchmarks.gpu.section import Bench, Row
from benchmarks.gpu.sections import decode, fp8_kv, fused, launches, prefill, sampling, tiles

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PROCESSES = 12


@dataclass(frozen=True)
class Job:
    """A call in one of the processes; all of it can be pickled."""

    name: str
    run: Callable[..., Iterable[Row]]
    arguments: tuple[Any, ...]


def run(bench: Bench) -> Iterator[Row]:
    """One row per case, as they end."""
    if bench.is_tiny:
        yield from attention.correctness(bench, launches.TINY_CASES, [torch.float32])
        yield from row_kernels.correctness(bench, row_kernels.TOY_SIZES, [torch.float32])
        return
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    yield from run_jobs([*checks(bench), *compilations(bench)], processes)


def run_jobs(jobs: Sequence[Job], processes: int) -> Iterator[Row]:
    """The jobs' rows. What fails beside others gets a process of its own, and a row if it fails there too."""
    failed = []
    with _pool(processes) as pool:
        futures = {pool.submit(_run, job): job for job in jobs}
        for future in as_completed(futures):
            if future.exception() is None:
                yield from future.result()
            else:
                failed.append(futures[future])
    with ThreadPoolExecutor(processes) as threads:
        for rows in threads.map(_run_alone, failed):
            yield from rows


def _run_alone(job: Job) -> list[Row]:
    with _pool(1) as pool:
        try:
            return pool.submit(_run, job).result()
        except Exception as error:  # a process that died included
            why = f"{type(error).__name__}: {error}".strip().splitlines()[0]
            return [Row(case=job.name, unit="error", ok=False, facts={"why": why})]


def _pool(processes: int) -> ProcessPoolExecutor:
    # Spawned: a process that has used CUDA can't be forked. Each would use every core for its work on the CPU.
    return ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def _run(job: Job) -> list[Row]:
    return list(job.run(*job.arguments))


def checks(bench: Bench) -> Iterator[Job]:
    # The longest case first: the others fill the time beside it.
    for case in sorted(attention.EVERY_CASE, key=lambda case: -sum(case[0][1])):
        for dtype in DTYPES:
            name = f"{case[1].name} {case[2] or ''} {dtype}"
            yield Job(name, attention.correctness, (bench, [case], [dtype]))
    for dtype in DTYPES:
        yield Job(f"rows {dtype}", row_kernels.correctness, (bench, row_kernels.CHECKED_SIZES, [dtype]))


def compilations(bench: Bench) -> Iterator[Job]:
    """Launches of what the timed sections launch; few rows are split over their keys, many are not."""
    bench = replace(bench, measure=_once)
    yield Job("compile fused rows", _compile, (fused.compile_all, bench))
    yield Job("compile sampling", _compile, (sampling.run, bench))
    yield Job("compile fp8 and int8 caches", _compile, (fp8_kv.compile_all, bench))
    for shape in decode.SHAPES:
        for block_size in decode.BLOCK_SIZES:
            sizes = [(1, 1024), (256, 1024)]
            yield Job("compile decode", _compile, (decode.timed, bench, [shape], [block_size], sizes))
    for shape in prefill.SHAPES:
        yield Job("compile prefill", _compile, (prefill.timed, bench, [shape], [[(200, 300)]]))
    for tile in tiles.DECODE_TILES:
        sizes = [(1, 1024), (256, 16)]
        yield Job("compile tile", _compile, (tiles.timed_decode, bench, attention.LLAMA_8B, sizes, [tile]))
    for tile in tiles.PREFILL_TILES:
        yield Job("compile tile", _compile, (tiles.timed_prefill, bench, attention.LLAMA_8B, 200, [tile]))


def _once(run: Callable[[], object]) -> float:
    run()
    return 1.0


def _compile(run: Callable[..., Iterable[Row]], *arguments: Any) -> list[Row]:
    for _ in run(*arguments):
        pass
    return []
