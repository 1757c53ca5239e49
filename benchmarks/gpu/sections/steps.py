"""Single steps of the engine, with decoding rows only and with one prompt among them, and their kernels."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu.engines import OpenEngine, open_engine
from benchmarks.gpu.floors import Step
from benchmarks.gpu.models import LLAMA_8B, random_tokens
from benchmarks.gpu.section import Bench, Row
from pagemill.engine.engine import Engine
from pagemill.engine.sampling_params import SamplingParams

_PROFILED_STEPS = 4
_LONGEST = 8
"""Number of kernels of a profile that get a row."""


def run(bench: Bench) -> Iterator[Row]:
    yield from timed(bench)


def run_fp8(bench: Bench) -> Iterator[Row]:
    yield from timed(bench, quantization="fp8")


def timed(bench: Bench, **options: Any) -> Iterator[Row]:
    """Decode rows of 800 keys, first alone, then with a new prompt of 512 tokens in every step."""
    rows, keys, prompt, steps = (4, 20, 12, 4) if bench.is_tiny else (240, 800, 512, 64)
    opened = open_engine(bench, LLAMA_8B, **options)
    engine, draw = opened.llm.engine, random.Random(1)
    names = [f"decode-{number}" for number in range(rows)]

    def add(name: str, length: int, outputs: int) -> None:
        params = SamplingParams(temperature=0.6, ignore_eos=True, max_tokens=outputs, seed=len(name))
        engine.add_request(name, random_tokens(draw, opened.model, length), params)

    def add_prompt(number: int) -> None:
        add(f"prompt-{number}", prompt, 1)

    try:
        for name in names:
            add(name, keys, 6 * steps)
        reading = set(names)
        while reading:
            reading -= {output.request_id for output in engine.step() if output.deltas}
        decode = Step([(1, keys + steps)] * rows)
        yield _row(bench, opened, f"{rows} rows decode", decode, _timed(opened, steps, lambda _: None))
        mixed = Step([(1, keys + 2 * steps)] * rows + [(prompt, prompt)])
        case = f"{rows} rows decode beside a prompt of {prompt}"
        yield _row(bench, opened, case, mixed, _timed(opened, steps, add_prompt))
        yield from _profile(bench, opened, "mixed", lambda number: add_prompt(steps + number))
        yield from _profile(bench, opened, "decode", lambda _: None)
    finally:
        for name in names:
            engine.abort(name)
        while engine.has_unfinished():
            engine.step()


@dataclass(frozen=True)
class _Timed:
    """Averages over steps."""

    seconds: float
    replayed: float
    """The share of steps that replayed a graph."""
    host_ms: dict[str, float]
    """By phase; hidden behind the device if steps overlap, except `sample`, which includes waiting."""


def _timed(opened: OpenEngine, steps: int, before: Callable[[int], None]) -> _Timed:
    engine = opened.llm.engine
    host = _host_seconds(engine)
    stats = engine.stats().steps
    finished, replayed = stats.finished, stats.replayed
    started = time.perf_counter()
    for number in range(steps):
        before(number)
        engine.step()
    seconds = time.perf_counter() - started
    stats = engine.stats().steps
    count = stats.finished - finished
    host_ms = {
        phase: round((total - host.get(phase, 0.0)) / count * 1e3, 2)
        for phase, total in _host_seconds(engine).items()
    }
    return _Timed(seconds / count, (stats.replayed - replayed) / count, host_ms)


def _host_seconds(engine: Engine) -> dict[str, float]:
    """Return the host's seconds by phase so far, over all kinds of steps."""
    totals: dict[str, float] = {}
    for (phase, _), histogram in engine.stats().histograms["step_seconds"].items():
        totals[phase] = totals.get(phase, 0.0) + histogram.total
    return totals


def _row(bench: Bench, opened: OpenEngine, case: str, step: Step, timed: _Timed) -> Row:
    is_fp8 = "quantization" in opened.options
    return Row(
        case=case,
        measured=timed.seconds,
        floor=bench.floor.step(opened.model, step, fp8=is_fp8),
        facts={"model": opened.model.name, "replayed": timed.replayed, "host_ms": timed.host_ms},
    )


def _profile(bench: Bench, opened: OpenEngine, kind: str, before: Callable[[int], None]) -> Iterator[Row]:
    """Return the slowest kernels (on a CPU, operators): seconds of each per step."""
    on_card = bench.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if on_card else ProfilerActivity.CPU]) as profiled:
        for number in range(_PROFILED_STEPS):
            before(number)
            opened.llm.engine.step()
        if on_card:
            torch.cuda.synchronize()
    attribute = "self_device_time_total" if on_card else "self_cpu_time_total"  # microseconds
    taken = sorted(
        ((getattr(event, attribute), event) for event in profiled.key_averages()), key=lambda e: -e[0]
    )
    for microseconds, event in taken[:_LONGEST]:
        calls = event.count / _PROFILED_STEPS
        seconds = microseconds / 1e6 / _PROFILED_STEPS
        yield Row(case=f"{kind} step: {event.key[:100]}", measured=seconds, facts={"calls": calls})
