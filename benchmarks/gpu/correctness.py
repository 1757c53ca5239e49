"""The correctness section of `benchmarks.gpu`: all kernels, spread over processes.

Most of its time is compilation, which the other sections find done in Triton's cache on the disk. A case that loses
its process the device takes the cases after it along: those are run again, each in a process of its own.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.gpu import attention
from benchmarks.gpu import rows as gpu_rows
from pagemill.kernels.gpu.tuning import Tile

Row = dict[str, Any]

_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_MOST_PROCESSES = 12


@dataclass(frozen=True)
class Job:
    """A call in one of the processes; all of it can be pickled."""

    name: str
    run: Callable[..., Iterable[Row]]
    arguments: tuple[Any, ...]


def run(device: torch.device, *, is_dry: bool) -> Iterator[Row]:
    """One row per case, as they end."""
    if is_dry:
        shape = attention.Shape("toy", 2, 1, 64)
        cases: list[Any] = [(([1, 3], [20, 9]), shape, {})]
        yield from attention.correctness(device, cases, [torch.float32])
        yield from gpu_rows.correctness(device, gpu_rows.TOY_SIZES, [torch.float32])
        return
    processes = max(1, min(_MOST_PROCESSES, (os.cpu_count() or 2) - 2))
    yield from run_jobs([*_checks(device), *_compilations(device)], processes)


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
            return [{"case": job.name, "ok": False, "why": why}]


def _pool(processes: int) -> ProcessPoolExecutor:
    # Spawned: a process that has used CUDA can't be forked. Each would use every core for its work on the CPU.
    return ProcessPoolExecutor(
        processes, multiprocessing.get_context("spawn"), initializer=torch.set_num_threads, initargs=(1,)
    )


def _run(job: Job) -> list[Row]:
    return list(job.run(*job.arguments))


def _checks(device: torch.device) -> Iterator[Job]:
    # The longest case first: the others fill the time beside it.
    for case in sorted(attention.EVERY_CASE, key=lambda case: -sum(case[0][1])):
        for dtype in _DTYPES:
            name = f"{case[1].name} {case[2] or ''} {dtype}"
            yield Job(name, attention.correctness, (device, [case], [dtype]))
    for dtype in _DTYPES:
        yield Job(f"rows {dtype}", gpu_rows.correctness, (device, gpu_rows.CHECKED_SIZES, [dtype]))


def _compilations(device: torch.device) -> Iterator[Job]:
    """Launches of what the timed sections launch."""
    yield Job("compile rows", _compile_rows, (device,))
    for shape in attention.TIMED_SHAPES:
        for block_size in attention.TIMED_BLOCK_SIZES:
            yield Job(f"compile decode {shape.name}", _compile_decode, (device, shape, block_size))
        yield Job(f"compile prefill {shape.name}", _compile_prefill, (device, shape))
    for tile in attention.DECODE_TILES:
        yield Job(f"compile {tile}", _compile_tiles, (device, [tile], []))
    for tile in attention.PREFILL_TILES:
        yield Job(f"compile {tile}", _compile_tiles, (device, [], [tile]))


def _once(run: Callable[[], object]) -> float:
    run()
    return 1.0


def _compile_rows(device: torch.device) -> list[Row]:
    return _without_rows(gpu_rows.speed(device, _once, None, gpu_rows.COMPILED_SIZES))


def _compile_decode(device: torch.device, shape: attention.Shape, block_size: int) -> list[Row]:
    """Few rows are split over their keys, many are not."""
    sizes: dict[str, Any] = {"shapes": [shape], "block_sizes": [block_size], "bytes_per_call": 1}
    return _without_rows(
        attention.decode(device, _once, None, batch_sizes=(1, 256), kv_lens=(1024,), **sizes)
    )


def _compile_prefill(device: torch.device, shape: attention.Shape) -> list[Row]:
    return _without_rows(attention.prefill(device, _once, None, shapes=[shape], batches=[([200], [300])]))


def _compile_tiles(device: torch.device, decode_tiles: list[Tile], prefill_tiles: list[Tile]) -> list[Row]:
    sizes: dict[str, Any] = {"decodes": ((1, 1024), (256, 16)), "prefill_len": 200}
    return _without_rows(
        attention.tiles(device, _once, decode_tiles=decode_tiles, prefill_tiles=prefill_tiles, **sizes)
    )


def _without_rows(rows: Iterable[Row]) -> list[Row]:
    for _ in rows:
        pass
    return []
