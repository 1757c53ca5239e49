"""Output tokens per second, compared with static batches, vLLM and OpenVINO on the same requests and weights.

Every engine's process is started once, loads, warms up, and is stopped in place while another one runs. One pass of
one workload is ordered from each engine in turn, and every other round in the reverse order. Ratios are taken
between passes of one round, which follow each other within seconds.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import report
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
    """Start time of the pass, in seconds since the first one."""
    timing: Timing
    processor_s: float = 0.0
    """CPU time of the engine's processes."""


@dataclass(slots=True)
class Measurements:
    """All measurements of one invocation, in order."""

    passes: list[Pass] = field(default_factory=list)
    ready: dict[str, Ready] = field(default_factory=dict)
    peak_memory_bytes: dict[str, int] = field(default_factory=dict)
    failures: dict[str, str] = field(default_factory=dict)
    """Crashed engines, and their last output. Their passes until then are retained."""

    @property
    def contenders(self) -> list[str]:
        return [name for name in self.ready if any(item.contender == name for item in self.passes)]

    def by_round(self, contender: str, workload: str) -> dict[int, Timing]:
        return {item.round_number: item.timing for item in self._passes(contender, workload)}

    def _passes(self, contender: str, workload: str) -> list[Pass]:
        return [p for p in self.passes if (p.contender, p.timing.workload) == (contender, workload)]

    def rates(self, contender: str, workload: str) -> list[float]:
        return [timing.tokens_per_second for timing in self.by_round(contender, workload).values()]

    def ratios(self, subject: str, contender: str, workload: str) -> list[float]:
        """Return the ratio of the subject's to the contender's throughput, per round in which both completed a pass."""
        ours, theirs = self.by_round(subject, workload), self.by_round(contender, workload)
        return [ours[n].tokens_per_second / theirs[n].tokens_per_second for n in ours if n in theirs]

    def processor_ratios(self, subject: str, contender: str, workload: str) -> list[float]:
        """Return the ratio of the subject's to the contender's CPU time, per round in which both completed a pass."""
        ours, theirs = (
            {each.round_number: each.processor_s for each in self._passes(name, workload)}
            for name in (subject, contender)
        )
        return [ours[n] / theirs[n] for n in ours if theirs.get(n)]

    def equal_outputs(self, contender: str, reference: str, workload: str) -> tuple[int, int] | None:
        """(requests with the reference's outputs, requests), over the rounds of both. In fp32 near-ties can differ."""
        ours, theirs = self.by_round(contender, workload), self.by_round(reference, workload)
        both = [(ours[n].outputs, theirs[n].outputs) for n in ours if n in theirs]
        pairs = [pair for outputs in both for pair in zip(*outputs, strict=True)]
        return (sum(a == b for a, b in pairs), len(pairs)) if pairs else None


def add_arguments(parser: argparse.ArgumentParser, rounds: int) -> None:
    """Add the options of a comparison over the three workloads."""
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=rounds, help="passes of every engine, taking turns")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--share", type=float, default=1.0, help="share of each workload's requests, for a dry run"
    )
    parser.add_argument("--kv-cache-gib", type=int, default=2, help="KV cache of every engine that has one")


def checked(parser: argparse.ArgumentParser, arguments: Sequence[str] | None = None) -> argparse.Namespace:
    given = parser.parse_args(arguments)
    if given.rounds < 1 or not 0.0 < given.share <= 1.0:
        parser.error("--rounds must be at least 1 and --share in (0, 1]")
    return given


def prepare(given: argparse.Namespace, options: Mapping[str, Any]) -> tuple[Request, list[Workload], int]:
    """Return the engines' request, the workloads, and the vocabulary's size.

    The warm-up is an eighth of each workload, with another seed.
    """
    directory = report.model_directory(given.model)
    vocab_size = report.config_of(directory)["vocab_size"]
    workloads, warmup = (
        [WORKLOADS[name](vocab_size, seed, share) for name in given.workloads]
        for seed, share in ((given.seed, given.share), (given.seed + 1, given.share / 8))
    )
    longest = max(workload.longest for workload in [*workloads, *warmup])
    kv_bytes = given.kv_cache_gib * 2**30
    return Request(str(directory), warmup, longest, kv_bytes, dict(options)), workloads, vocab_size


def measure_all(
    measurements: Measurements, contenders: Sequence[Contender], request: Request, workloads: Sequence[Workload],
    *, vocab_size: int, rounds: int, console: Console, unit: str = "tokens/s",
    after_pass: Callable[[str], object] = lambda name: None,
) -> None:  # fmt: skip
    """Add to `measurements`; `after_pass` is called with the engine's name.

    An engine that fails is recorded in `failures` and takes no further part. All engines' processes have
    exited when this returns or raises.
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
            after_pass(contender.name)


def schedule(
    contenders: Sequence[Contender], workloads: Sequence[Workload], rounds: int
) -> Iterator[tuple[int, Workload, Contender]]:
    """The passes in order: each engine once per round and workload; every other round in reverse order."""
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


Cell = Callable[[str, str], str]
"""(engine, workload) -> text of the table cell."""


def rates_table(
    title: str, measurements: Measurements, workloads: Sequence[Workload], columns: Mapping[str, Cell],
    scales: Mapping[str, int] | None = None,
) -> Table:  # fmt: skip
    """The rates of every engine, by workload, and further columns. `scales`: factors of workloads' rates."""
    view = report.table(title, ("workload", "engine"), ("median", "lowest", "best", *columns))
    for workload in (each.name for each in workloads):
        scale = (scales or {}).get(workload, 1)
        for engine in measurements.contenders:
            if rates := measurements.rates(engine, workload):
                spread = (statistics.median(rates), min(rates), max(rates))
                figures = (f"{scale * rate:.1f}" for rate in spread)
                view.add_row(
                    workload, engine, *figures, *(cell(engine, workload) for cell in columns.values())
                )
        view.add_section()
    return view


def subject_columns(measurements: Measurements) -> dict[str, Cell]:
    """Columns with the ratio of each Pagemill engine's rate to every engine's rate."""
    ours = [name for name in SUBJECTS if name in measurements.contenders]
    return {f"{name} is": partial(ratio_cell, measurements, name) for name in ours}


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    columns: dict[str, Cell] = {
        "rounds": lambda engine, workload: str(len(measurements.rates(engine, workload))),
        **subject_columns(measurements),
        "same tokens": partial(same_cell, measurements, REFERENCE),
    }
    title = "Output tokens per second (greedy, fp32 unless the name says otherwise)"
    return rates_table(title, measurements, workloads, columns)


def summary(measurements: Measurements, workloads: Sequence[Workload]) -> dict[str, Any]:
    """The JSON file's entry per workload and engine, without output tokens."""
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


def as_json(measurements: Measurements, unit: str = "tokens_per_second") -> dict[str, Any]:
    """The engines, and every measurement in order."""
    ready = measurements.ready
    passes = [
        {
            "round": item.round_number, "workload": item.timing.workload, "engine": item.contender,
            "at_s": round(item.at_s, 1), "seconds": round(item.timing.seconds, 3),
            unit: round(item.timing.tokens_per_second, 2),
        }
        for item in measurements.passes
    ]  # fmt: skip
    return {
        "versions": {name: each.versions for name, each in ready.items()},
        "load_seconds": {name: round(each.load_seconds, 1) for name, each in ready.items()},
        "peak_memory_bytes": measurements.peak_memory_bytes,
        "failures": measurements.failures,
        "passes": passes,
    }


def _engine_summary(measurements: Measurements, contender: str, workload: str) -> dict[str, Any]:
    rates = measurements.rates(contender, workload)
    found: dict[str, Any] = {
        "tokens_per_second": [round(rate, 2) for rate in rates],
        "median": round(statistics.median(rates), 2),
        "outputs_equal_to_transformers": measurements.equal_outputs(contender, REFERENCE, workload),
    }
    for subject in SUBJECTS:
        ratios = measurements.ratios(subject, contender, workload)
        if ratios and subject != contender:
            rounds = [round(ratio, 3) for ratio in ratios]
            found[f"{subject}_ratio"] = {"median": round(statistics.median(ratios), 3), "rounds": rounds}
    return found


def ratio_cell(measurements: Measurements, subject: str, contender: str, workload: str) -> str:
    return "" if subject == contender else spread_text(measurements.ratios(subject, contender, workload))


def spread_text(ratios: Sequence[float]) -> str:
    if not ratios:
        return ""
    return f"{statistics.median(ratios):.2f} x ({min(ratios):.2f}..{max(ratios):.2f})"


def same_cell(measurements: Measurements, reference: str, contender: str, workload: str) -> str:
    equal = measurements.equal_outputs(contender, reference, workload)
    return "" if contender == reference or equal is None else f"{equal[0]}/{equal[1]}"
