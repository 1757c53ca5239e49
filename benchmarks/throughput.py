"""Output tokens per second, beside static batches, vLLM and OpenVINO, from the same requests and weights.

Every engine's process is started once, loads, warms up, and is stopped in place while another one runs. One pass of
one workload is ordered from each engine in turn, and every other round in the reverse order. Ratios are taken
between passes of one round, which follow each other within seconds.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines.contenders import BF16_SUBJECT, INT8_SUBJECT, REFERENCE, SUBJECT, Contender
from benchmarks.engines.process import EngineFailedError, EngineProcess
from benchmarks.measure import Ready, Request, Timing
from benchmarks.workloads import WORKLOADS, Workload

SUBJECTS = (SUBJECT, BF16_SUBJECT, INT8_SUBJECT)


@dataclass(frozen=True, slots=True)
class Pass:
    """One engine's pass over one workload."""

    contender: str
    round_number: int
    at_s: float
    """When it was ordered, seconds since the first one."""
    timing: Timing
    processor_s: float = 0.0
    """The processor time of the engine's processes."""


@dataclass(frozen=True, slots=True)
class Spread:
    """A median and how far the single values lie from it."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        return cls(statistics.median(values), min(values), max(values))


@dataclass(slots=True)
class Measurements:
    """Everything one invocation measured, in the order in which it was measured."""

    passes: list[Pass] = field(default_factory=list)
    ready: dict[str, Ready] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Engines that died, and what they last wrote. Their passes until then stay."""

    @property
    def contenders(self) -> list[str]:
        return [name for name in self.ready if any(item.contender == name for item in self.passes)]

    def by_round(self, contender: str, workload: str) -> dict[int, Timing]:
        return {
            item.round_number: item.timing
            for item in self.passes
            if item.contender == contender and item.timing.workload == workload
        }

    def rates(self, contender: str, workload: str) -> list[float]:
        return [timing.tokens_per_second for timing in self.by_round(contender, workload).values()]

    def ratios(self, subject: str, contender: str, workload: str) -> list[float]:
        """Return the subject's throughput over the contender's, per round in which both made a pass."""
        ours, theirs = self.by_round(subject, workload), self.by_round(contender, workload)
        return [ours[n].tokens_per_second / theirs[n].tokens_per_second for n in ours if n in theirs]

    def processor_ratios(self, subject: str, contender: str, workload: str) -> list[float]:
        """Return the subject's processor time over the contender's, per round in which both made a pass."""
        ours, theirs = (
            {
                item.round_number: item.processor_s
                for item in self.passes
                if (item.contender, item.timing.workload) == (name, workload)
            }
            for name in (subject, contender)
        )
        return [ours[n] / theirs[n] for n in ours if theirs.get(n)]

    def equal_outputs(self, contender: str, workload: str) -> tuple[int, int] | None:
        """(requests whose tokens equal transformers', requests). In fp32 only near-ties may differ."""
        theirs, reference = self.by_round(contender, workload), self.by_round(REFERENCE, workload)
        pairs = [
            pair
            for n in theirs
            if n in reference
            for pair in zip(theirs[n].outputs, reference[n].outputs, strict=True)
        ]
        return (sum(a == b for a, b in pairs), len(pairs)) if pairs else None


def build_request(
    model: str, vocab_size: int, workloads: Sequence[Workload], *, seed: int, share: float, kv_cache_gib: int,
    options: Mapping[str, Any],
) -> Request:  # fmt: skip
    """The workloads that engines get ready for; as warm-up a small share of each, from another seed."""
    warmup = [WORKLOADS[workload.name](vocab_size, seed + 1, share / 8) for workload in workloads]
    return Request(
        model=model,
        warmup=warmup,
        longest=max(workload.longest for workload in [*workloads, *warmup]),
        kv_cache_memory_bytes=kv_cache_gib * 2**30,
        options=dict(options),
    )


def measure_all(
    measurements: Measurements, contenders: Sequence[Contender], request: Request, workloads: Sequence[Workload],
    *, vocab_size: int, rounds: int, console: Console, unit: str = "tokens/s",
) -> Generator[str, None, None]:  # fmt: skip
    """Add to `measurements`; yields an engine's name after each of its passes.

    An engine that fails is named in `failures` and takes no further part. However the generator ends, every
    engine's process has ended then.
    """
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pagemill-bench-")))
        running: dict[str, EngineProcess] = {}
        for contender in contenders:
            process = stack.enter_context(EngineProcess(contender, request, directory))
            with (
                console.status(f"starting {contender.name} ({contender.description})"),
                _failure_noted(measurements, process),
            ):
                measurements.ready[contender.name] = process.wait_until_ready()
                running[contender.name] = process
        begun = time.monotonic()
        for number, workload, contender in schedule(contenders, workloads, rounds):
            if contender.name not in running:
                continue
            process = running[contender.name]
            at = time.monotonic() - begun
            with (
                console.status(f"round {number} of {rounds}: {workload.name} on {contender.name}"),
                _failure_noted(measurements, process),
            ):
                before_s = process.processor_seconds()
                timing = process.measure(workload.renewed(vocab_size, number - 1))
                used_s = process.processor_seconds() - before_s
                measurements.passes.append(Pass(contender.name, number, at, timing, used_s))
                measurements.peak_memory_bytes[contender.name] = process.peak_memory_bytes()
                console.print(
                    f"round {number} of {rounds}: {workload.name:8} {contender.name:14} "
                    f"{timing.tokens_per_second:8.1f} {unit}"
                )
            if contender.name in measurements.failures:
                del running[contender.name]
            yield contender.name


def schedule(
    contenders: Sequence[Contender], workloads: Sequence[Workload], rounds: int
) -> Iterator[tuple[int, Workload, Contender]]:
    """The passes in order: per round and workload each engine once, every other round the other way about."""
    for number in range(1, rounds + 1):
        order = list(contenders if number % 2 else reversed(contenders))
        for workload in workloads:
            for contender in order:
                if contender.every_round or number in (1, rounds):
                    yield number, workload, contender


@contextlib.contextmanager
def _failure_noted(measurements: Measurements, process: EngineProcess) -> Iterator[None]:
    try:
        yield
    except EngineFailedError as error:
        measurements.failures[process.contender.name] = str(error)
        print(error, file=sys.stderr)
        process.close()


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    subjects = [name for name in SUBJECTS if name in measurements.contenders]
    view = Table(title="Output tokens per second (greedy, fp32 unless the name says otherwise)")
    view.add_column("workload")
    view.add_column("engine")
    columns = ("median", "lowest", "best", "rounds", *(f"{name} is" for name in subjects), "same tokens")
    for column in columns:
        view.add_column(column, justify="right")
    for workload in workloads:
        counts = (len(workload.prompts), workload.num_prompt_tokens, workload.num_output_tokens)
        shape = "{} requests, {} in, {} out".format(*counts)
        measured = [name for name in measurements.contenders if measurements.rates(name, workload.name)]
        for number, contender in enumerate(measured):
            rates = Spread.of(measurements.rates(contender, workload.name))
            equal = measurements.equal_outputs(contender, workload.name)
            view.add_row(
                workload.name if number == 0 else shape if number == 1 else "",
                contender,
                *(f"{rate:.1f}" for rate in (rates.median, rates.low, rates.high)),
                str(len(measurements.rates(contender, workload.name))),
                *(ratio_cell(measurements, name, contender, workload.name) for name in subjects),
                "" if contender == REFERENCE or equal is None else f"{equal[0]}/{equal[1]}",
            )
        view.add_section()
    return view


def summary(measurements: Measurements, workloads: Sequence[Workload]) -> dict[str, Any]:
    """The JSON file's entry per workload and engine; output tokens themselves are left out."""
    return {
        workload.name: {
            "requests": len(workload.prompts),
            "prompt_tokens": workload.num_prompt_tokens,
            "output_tokens": workload.num_output_tokens,
            "engines": {
                name: _engine_summary(measurements, name, workload.name)
                for name in measurements.contenders
                if measurements.rates(name, workload.name)
            },
        }
        for workload in workloads
    }


def passes_as_json(measurements: Measurements) -> list[dict[str, Any]]:
    """Every figure, in the order of measuring."""
    return [
        {
            "round": item.round_number, "workload": item.timing.workload, "engine": item.contender,
            "at_s": round(item.at_s, 1), "seconds": round(item.timing.seconds, 3),
            "tokens_per_second": round(item.timing.tokens_per_second, 2),
        }
        for item in measurements.passes
    ]  # fmt: skip


def _engine_summary(measurements: Measurements, contender: str, workload: str) -> dict[str, Any]:
    rates = measurements.rates(contender, workload)
    found: dict[str, Any] = {
        "tokens_per_second": [round(rate, 2) for rate in rates],
        "median": round(statistics.median(rates), 2),
        "outputs_equal_to_transformers": measurements.equal_outputs(contender, workload),
    }
    for subject in SUBJECTS:
        ratios = measurements.ratios(subject, contender, workload)
        if ratios and subject != contender:
            spread = Spread.of(ratios)
            found[f"{subject}_ratio"] = {
                "median": round(spread.median, 3), "min": round(spread.low, 3), "max": round(spread.high, 3),
                "rounds": [round(ratio, 3) for ratio in ratios],
            }  # fmt: skip
    return found


def ratio_cell(measurements: Measurements, subject: str, contender: str, workload: str) -> str:
    ratios = measurements.ratios(subject, contender, workload)
    if subject == contender or not ratios:
        return ""
    spread = Spread.of(ratios)
    return f"{spread.median:.2f} x ({spread.low:.2f}..{spread.high:.2f})"
