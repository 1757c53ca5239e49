"""Measures decoding by number of rows, and long prompts, alternating engines; used by `experts` and `gguf`."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from benchmarks.engines.contenders import Contender
from benchmarks.measure import Request
from benchmarks.throughput import Measurements, as_json, measure_all, rates_table, subject_columns
from benchmarks.workloads import LOWEST_TOKEN_ID, Workload

PROMPTS, PROMPT_IN = 4, 512
KV_CACHE_BYTES = 2**30


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that decode together, with tokens per prompt and output. `prompt`: requests with one output token."""

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
    measure_all(
        measurements, contenders, request, workloads, vocab_size=rows.vocab_size, rounds=rounds, console=console
    )  # fmt: skip
    title = "Tokens per second (prompt: prompt tokens, otherwise output tokens)"
    columns, scales = subject_columns(measurements), {"prompt": PROMPT_IN}
    console.print(rates_table(title, measurements, workloads, columns, scales))
    return as_json(measurements)
