"""Decoding by number of rows, and long prompts, engines by turns: the measuring half of `experts` and `gguf`."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.engines.contenders import INT8_SUBJECT, SUBJECT, Contender
from benchmarks.measure import Request
from benchmarks.throughput import Measurements, Spread, measure_all, passes_as_json, ratio_cell
from benchmarks.workloads import LOWEST_TOKEN_ID, Workload

PROMPTS, PROMPT_IN = 4, 512
KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Rows:
    """How many rows decode at once, and the tokens each brings and gets. `prompt` is requests that get one token."""

    counts: Sequence[int]
    given: int
    made: int
    vocab_size: int

    def workloads(self, seed: int) -> list[Workload]:
        rng = random.Random(f"rows {seed}")

        def workload(name: str, count: int, length: int, new: int) -> Workload:
            prompts = [
                [rng.randrange(LOWEST_TOKEN_ID, self.vocab_size) for _ in range(length)] for _ in range(count)
            ]
            return Workload(name, prompts, [new] * count)

        decode = [workload(f"rows-{count}", count, self.given, self.made) for count in self.counts]
        return [*decode, workload("prompt", PROMPTS, PROMPT_IN, 1)]


def measure(
    rows: Rows, model: str, contenders: Sequence[Contender], rounds: int, console: Console
) -> dict[str, Any]:
    """Print a table and return the report's entries."""
    workloads = rows.workloads(0)
    request = Request(model, rows.workloads(1), PROMPT_IN + rows.made, KV_CACHE_BYTES)
    measurements = Measurements()
    passes = measure_all(
        measurements, contenders, request, workloads, vocab_size=rows.vocab_size, rounds=rounds, console=console
    )  # fmt: skip
    with contextlib.closing(passes):
        for _ in passes:
            pass
    console.print(_table(measurements, workloads))
    return {
        "versions": {engine: ready.versions for engine, ready in measurements.ready.items()},
        "peak_memory_bytes": measurements.peak_memory_bytes,
        "failures": measurements.failures,
        "passes": passes_as_json(measurements),
    }


def _table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    view = Table(title="Tokens per second (prompt: tokens read, else tokens made)")
    subjects = [each for each in (SUBJECT, INT8_SUBJECT) if each in measurements.contenders]
    columns = ("workload", "engine", "median", "lowest", "best", *(f"{each} is" for each in subjects))
    for column in columns:
        view.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    for workload in workloads:
        scale = PROMPT_IN if workload.name == "prompt" else 1
        for engine in measurements.contenders:
            rates = Spread.of(measurements.rates(engine, workload.name))
            figures = (f"{scale * rate:.1f}" for rate in (rates.median, rates.low, rates.high))
            ratios = (ratio_cell(measurements, each, engine, workload.name) for each in subjects)
            view.add_row(workload.name, engine, *figures, *ratios)
    return view
