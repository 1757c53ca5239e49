"""Checks every kernel against fp64, distributed over processes.

Most of the time is compilation, whose results the other sections find in Triton's cache on disk. If a case
crashes its process or the device, it takes later cases with it. Those run again, each in a separate process.
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
from benchmarks.gpu.engines import compile_engine
from benchmarks.gpu.models import LLAMA_8B, QWEN_600M
from benchmarks.gpu.section import Bench, Row, Skipped
from benchmarks.gpu.sections import decode, fused, prefill, tiles
from pagemill.kernels.gpu.attention_backend import Unavailable
from pagemill.kernels.types.layer_cache import FP8

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PROCESSES = 12
# Split decode and prefill; the same over fp8; enough rows that none is split.
LAUNCHED: list[Any] = [
    (([1, 1, 40], [700, 33, 300]), attention.LLAMA_8B, {}),
    (([1, 1, 40], [700, 33, 300]), attention.LLAMA_8B, {"cache_dtype": FP8}),
    (([1] * 80, [20] * 80), attention.LLAMA_8B, {}),
]
TINY_CASES: list[Any] = [(([1, 3], [20, 9]), attention.TOY, {})]


@dataclass(frozen=True)
class Job:
    """A call in one of the processes; all of it can be pickled."""

    name: str
    run: Callable[..., Iterable[Row]]
    arguments: tuple[Any, ...]


def run(bench: Bench) -> Iterator[Row]:
    """One row per case, in order of completion."""
    if bench.is_tiny:
        yield from attention.correctness(bench, TINY_CASES, [torch.float32])
        yield from row_kernels.correctness(bench, row_kernels.TOY_SIZES, [torch.float32])
        return
    yield from run_jobs([*checks(bench), *compilations(bench)], num_processes())


def run_launches(bench: Bench) -> Iterator[Row]:
    """One launch of every kernel, and one captured graph, which must work before any measurement."""
    cases, sizes = (
        (TINY_CASES, row_kernels.TOY_SIZES) if bench.is_tiny else (LAUNCHED, row_kernels.LAUNCHED_SIZES)
    )
    dtype = torch.float32 if bench.is_tiny else torch.bfloat16
    if bench.device.type == "cuda":
        yield from run_jobs(list(launches(bench)), num_processes())
    else:
        yield from attention.correctness(bench, cases, [dtype])
        yield from row_kernels.correctness(bench, sizes, [dtype])
    workload = attention.make_workload(bench, attention.TOY, [(1, 40), (1, 7)])
    yield Row(case="a captured decode, replayed", measured=bench.measure(workload.run), ok=True)


def launches(bench: Bench) -> Iterator[Job]:
    """One launch of every kernel, and the kernels that the engines of timed sections compile at startup."""
    yield Job(
        "kernels over rows", row_kernels.correctness, (bench, row_kernels.LAUNCHED_SIZES, [torch.bfloat16])
    )
    for options in ({}, {"quantization": "fp8"}):
        yield Job(f"start {options}", compile_engine, (bench, LLAMA_8B, options))
    yield Job("start of a small model", compile_engine, (bench, QWEN_600M, {}))
    for case in LAUNCHED:
        yield Job(f"attention {case[0]}", attention.correctness, (bench, [case], [torch.bfloat16]))


def num_processes() -> int:
    return max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))


def run_fa3(bench: Bench) -> Iterator[Row]:
    """Every case that FlashAttention 3 computes, over caches without poison: it multiplies unused slots by zero."""
    try:
        library = attention.load_fa3(bench)
    except Unavailable as reason:
        raise Skipped(str(reason)) from None
    cases = TINY_CASES if bench.is_tiny else [*attention.EVERY_CASE, *attention.SINK_CASES]
    for case in cases:
        options = {name: value for name, value in case[2].items() if name != "free_outside_window"}
        if not {"alibi", "cache_dtype"} & options.keys():
            tamed = [(case[0], case[1], options)]
            # The op requires sinks in bf16, whose rounding exceeds fp16's tolerance.
            dtypes = DTYPES[1:2] if "sinks" in options else DTYPES[:2]
            yield from attention.correctness(bench, tamed, dtypes, library.attend, attention.without_poison)


def run_jobs(jobs: Sequence[Job], processes: int) -> Iterator[Row]:
    """Return the jobs' rows.

    A job that fails runs again in a separate process, and gets a row if it fails there too.
    """
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
        except Exception as error:  # includes a crashed process
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
    # The longest case first: the others run concurrently.
    for case in sorted(attention.EVERY_CASE, key=lambda case: -sum(case[0][1])):
        for dtype in DTYPES:
            name = f"{case[1].name} {case[2] or ''} {dtype}"
            yield Job(name, attention.correctness, (bench, [case], [dtype]))
    for dtype in DTYPES:
        yield Job(f"rows {dtype}", row_kernels.correctness, (bench, row_kernels.CHECKED_SIZES, [dtype]))


def compilations(bench: Bench) -> Iterator[Job]:
    """Compile the launches of timed sections; few rows are split over their keys, many are not."""
    bench = replace(bench, measure=_once)
    yield Job("compile fused rows", _compile, (fused.compile_all, bench))
    yield Job("compile sampling", _compile, (fused.run_sampling, bench))
    yield Job("compile fp8 and int8 caches", _compile, (decode.timed_dtypes, bench, [(1, 1024), (256, 1024)]))
    for shape in decode.SHAPES:
        for block_size in decode.BLOCK_SIZES:
            sizes = [(1, 1024), (256, 1024)]
            yield Job("compile decode", _compile, (decode.timed, bench, [shape], [block_size], sizes))
    for shape in prefill.SHAPES:
        yield Job("compile prefill", _compile, (prefill.timed, bench, [shape], [[(200, 300)]]))
    for tile in tiles.DECODE_TILES:
        sizes = [(1, 1024), (256, 1024)]
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
