"""Rows labelled per second when 2,000 rows share a prompt, beside vLLM with its prefix cache on.

`python -m benchmarks.bulk`. Every output is one of a few labels. `distinct`: no two rows are equal. `repeated`: each
row comes four times, as in data that nobody has deduplicated. `news`: rows of some 45 words, all different, behind an
instruction of some 150 tokens (`--rows 300`). Engines take turns as in `benchmarks.throughput`. Labels
need not agree everywhere: engines cut a label into tokens in different ways, and choose token by token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import random
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.engines import peers
from benchmarks.engines.contenders import Contender
from benchmarks.measure import Request
from benchmarks.report import model_directory, result_path, write
from benchmarks.throughput import Measurements, Spread, measure_all, passes_as_json, ratio_cell
from benchmarks.workloads import LOWEST_TOKEN_ID, Workload

GOAL = 3.0
CHOICES = ["positive", "negative", "neutral", "mixed"]
LABEL_TOKENS = 16
SHARED_TOKENS = 256
OWN_TOKENS = (16, 48)
LENGTHS = {"news": (150, (52, 72))}
"""Tokens that all rows share, and each row's own, where these are others than above."""
REPEATS = 4
OURS = Contender("pagemill", "benchmarks.engines.bulk_engine", "this engine, offline")
OURS_IN_INT8 = Contender(
    "pagemill-int8",
    "benchmarks.engines.bulk_engine",
    "this engine, int8 weights and activations",
    options=(("quantization", "int8"),),
)
OURS_IN_BF16 = Contender(
    "pagemill-bf16",
    "benchmarks.engines.bulk_engine",
    "this engine, bfloat16 products and KV cache",
    options=(("dtype", "bfloat16"),),
)
VLLM = Contender("vllm", "benchmarks.engines.bulk_vllm", "vLLM's CPU build, offline", peers.VLLM)
VLLM_IN_BF16 = Contender(
    "vllm-bf16",
    "benchmarks.engines.bulk_vllm",
    "vLLM's CPU build, bfloat16",
    peers.VLLM,
    (("PAGEMILL_BENCH_VLLM_DTYPE", "bfloat16"),),
)

CONTENDERS = (OURS, OURS_IN_BF16, OURS_IN_INT8, VLLM, VLLM_IN_BF16)


def build_workload(name: str, vocab_size: int, num_rows: int, seed: int) -> Workload:
    """Rows with a common beginning; `max_tokens` counts labels, so that a rate is in rows per second."""
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
    view = Table(title=f"Rows labelled per second (goal: {GOAL:.0f} x vLLM)")
    peers_here = [peer.name for peer in (VLLM, VLLM_IN_BF16) if peer.name in measurements.contenders]
    over = (f"over {name}" for name in peers_here)
    columns = ("workload", "engine", "median", "lowest", "best", *over, "labels as pagemill")
    for column in columns:
        view.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    for workload in workloads:
        for name in measurements.contenders:
            rates = Spread.of(measurements.rates(name, workload.name))
            ratios = [ratio_cell(measurements, name, peer, workload.name) for peer in peers_here]
            same = ""
            if name != OURS.name and measurements.rates(OURS.name, workload.name):
                same = "{}/{}".format(*same_labels(measurements, name, workload.name))
            figures = (f"{rate:.1f}" for rate in (rates.median, rates.low, rates.high))
            view.add_row(workload.name, name, *figures, *ratios, same)
    return view


def same_labels(measurements: Measurements, contender: str, workload: str) -> tuple[int, int]:
    ours, theirs = measurements.by_round(OURS.name, workload), measurements.by_round(contender, workload)
    pairs = [
        pair for n in ours if n in theirs for pair in zip(ours[n].outputs, theirs[n].outputs, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--engines",
        nargs="+",
        choices=[contender.name for contender in CONTENDERS],
        default=[OURS.name, VLLM.name],
    )
    parser.add_argument(
        "--workloads", nargs="+", choices=["distinct", "repeated", "news"], default=["distinct", "repeated"]
    )
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args()
    if min(given.rows, given.rounds) < 1:
        parser.error("--rows and --rounds must be at least 1")
    contenders = [contender for contender in CONTENDERS if contender.name in given.engines]
    if any(contender.peer for contender in contenders) and peers.VLLM.python() is None:
        print("vllm: no environment for it; see python -m benchmarks --install-peers", file=sys.stderr)
        contenders = [contender for contender in contenders if contender.peer is None]
    return run(given, contenders, Console(width=None if sys.stdout.isatty() else 120))


def run(given: argparse.Namespace, contenders: Sequence[Contender], console: Console) -> int:
    model = model_directory(given.model)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workloads = [build_workload(name, vocab_size, given.rows, given.seed) for name in given.workloads]
    warmup = build_workload(given.workloads[0], vocab_size, max(2, given.rows // 50), given.seed + 1)
    longest = (
        max(map(len, (prompt for workload in [*workloads, warmup] for prompt in workload.prompts)))
        + LABEL_TOKENS
    )
    request = Request(str(model), [warmup], longest, given.kv_cache_gib * 2**30, {"choices": CHOICES})
    started, where = datetime.now(UTC), machine.describe()
    path = given.out or result_path("bulk", started)
    measurements = Measurements()
    passes = measure_all(
        measurements, contenders, request, workloads, vocab_size=vocab_size, rounds=given.rounds,
        console=console, unit="rows/s",
    )  # fmt: skip
    with contextlib.closing(passes):
        for _ in passes:
            write(path, _report(given, measurements, started, where))
    if not measurements.passes:
        return 1
    console.print(table(measurements, workloads))
    console.print(f"written to {path}")
    return 1 if measurements.failures else 0


def _report(
    given: argparse.Namespace, measurements: Measurements, started: datetime, where: dict[str, Any]
) -> dict[str, Any]:
    return {
        "question": "rows labelled per second, one shared prompt, greedy; fp32 where the name says nothing else",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "model": given.model,
        "settings": {"rows": given.rows, "rounds": given.rounds, "seed": given.seed, "choices": CHOICES},
        "versions": {name: ready.versions for name, ready in measurements.ready.items()},
        "peak_memory_bytes": measurements.peak_memory_bytes,
        "failures": measurements.failures,
        **{
            f"over_{peer.name}": {
                workload: {
                    contender.name: measurements.ratios(contender.name, peer.name, workload)
                    for contender in (OURS, OURS_IN_BF16, OURS_IN_INT8)
                }
                for workload in given.workloads
            }
            for peer in (VLLM, VLLM_IN_BF16)
        },
        "passes": [
            {
                ("rows_per_second" if name == "tokens_per_second" else name): value
                for name, value in item.items()
            }
            for item in passes_as_json(measurements)
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
