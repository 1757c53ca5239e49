"""Rows labeled per second when 2,000 rows share a prompt, compared with vLLM with its prefix cache.

`python -m benchmarks.bulk`. Every output is one of a few labels. `distinct`: no two rows are equal.
`repeated`: each row occurs four times, as in data with duplicates. `news`: rows of about 45 words, all
different, after an instruction of about 150 tokens (`--rows 300`). Engines run alternately as in
`benchmarks.throughput`. Labels can differ between engines, because they tokenize a label differently and
choose token by token.
"""

from __future__ import annotations

import argparse
import random
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from rich.table import Table

from benchmarks import report, throughput
from benchmarks.engines import contenders
from benchmarks.engines.contenders import BF16_SUBJECT, INT8_SUBJECT, SUBJECT
from benchmarks.measure import Request
from benchmarks.throughput import Measurements, as_json, measure_all, ratio_cell
from benchmarks.workloads import LOWEST_TOKEN_ID, Workload

GOAL = 3.0
CHOICES = ["positive", "negative", "neutral", "mixed"]
LABEL_TOKENS = 16
SHARED_TOKENS = 256
OWN_TOKENS = (16, 48)
LENGTHS = {"news": (150, (52, 72))}
"""Numbers of shared tokens and of tokens per row, if they differ from those above."""
REPEATS = 4
NAMES = (SUBJECT, BF16_SUBJECT, INT8_SUBJECT)
PEERS = ("vllm", "vllm-bf16")
CONTENDERS = tuple(
    replace(each, options=tuple(option for option in each.options if option[0] in ("dtype", "quantization")))
    for each in contenders.CONTENDERS
    if each.name in (*NAMES, *PEERS)
)
"""Contenders with drafts and KV caches at their defaults."""


def build_workload(name: str, vocab_size: int, num_rows: int, seed: int) -> Workload:
    """Rows with a common prefix; `max_tokens` counts labels, so that a rate is in rows per second."""
    rng = random.Random(f"bulk {seed}")

    def tokens(count: int) -> list[int]:
        return [rng.randrange(LOWEST_TOKEN_ID, vocab_size) for _ in range(count)]

    num_shared, own = LENGTHS.get(name, (SHARED_TOKENS, OWN_TOKENS))
    shared = tokens(num_shared)
    num_distinct = -(-num_rows // REPEATS) if name == "repeated" else num_rows
    distinct = [shared + tokens(rng.randint(*own)) for _ in range(num_distinct)]
    rows = (distinct * REPEATS)[:num_rows] if name == "repeated" else distinct
    rng.shuffle(rows)
    return Workload(name, rows, [1] * num_rows)


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    def over(peer: str) -> throughput.Cell:
        return lambda engine, workload: ratio_cell(measurements, engine, peer, workload)

    columns = {f"over {name}": over(name) for name in PEERS if name in measurements.contenders}
    same = {f"labels as {SUBJECT}": partial(throughput.same_cell, measurements, SUBJECT)}
    title = f"Rows labeled per second (goal: {GOAL:.0f} x vLLM)"
    return throughput.rates_table(title, measurements, workloads, columns | same)


def main() -> int:
    parser = report.parser(__doc__)
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    names = [contender.name for contender in CONTENDERS]
    parser.add_argument("--engines", nargs="+", choices=names, default=[SUBJECT, "vllm"])
    parser.add_argument(
        "--workloads", nargs="+", choices=["distinct", "repeated", "news"], default=["distinct", "repeated"]
    )
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    if min(given.rows, given.rounds) < 1:
        parser.error("--rows and --rounds must be at least 1")
    return run(given, contenders.available_contenders(given.engines, CONTENDERS))


def run(given: argparse.Namespace, chosen: Sequence[contenders.Contender]) -> int:
    model = report.model_directory(given.model)
    vocab_size = report.config_of(model)["vocab_size"]
    workloads = [build_workload(name, vocab_size, given.rows, given.seed) for name in given.workloads]
    warmup = build_workload(given.workloads[0], vocab_size, max(2, given.rows // 50), given.seed + 1)
    longest = max(len(prompt) for each in [*workloads, warmup] for prompt in each.prompts) + LABEL_TOKENS
    request = Request(str(model), [warmup], longest, given.kv_cache_gib * 2**30, {"choices": CHOICES})
    question = "rows labeled per second, one shared prompt, greedy; fp32 where the name says nothing else"
    file, console, measurements = report.Report("bulk", question, given), report.console(), Measurements()
    measure_all(
        measurements, chosen, request, workloads, vocab_size=vocab_size, rounds=given.rounds, console=console,
        unit="rows/s", after_pass=lambda _: file.write(_figures(given, measurements)),
    )  # fmt: skip
    if not measurements.passes:
        return 1
    console.print(table(measurements, workloads))
    console.print(f"written to {file.path}")
    return 1 if measurements.failures else 0


def _figures(given: argparse.Namespace, measurements: Measurements) -> dict[str, Any]:
    return as_json(measurements, "rows_per_second") | {
        f"over_{peer}": {
            workload: {name: measurements.ratios(name, peer, workload) for name in NAMES}
            for workload in given.workloads
        }
        for peer in PEERS
    }


if __name__ == "__main__":
    sys.exit(main())
