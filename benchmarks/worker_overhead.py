"""The cost of queue, worker and producer: the bare engine against all of them, on the same requests.

`python -m benchmarks.worker_overhead`. The sides make their passes in turns, as in `benchmarks.throughput`; the share
of the bare engine's throughput that is left is taken round by round, and both must generate the same tokens.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine, throughput
from benchmarks.engines.contenders import Contender
from benchmarks.report import model_directory, result_path, write
from benchmarks.throughput import Measurements, Spread
from benchmarks.workloads import WORKLOADS, Workload

GOAL = 0.97
BARE = Contender("bare", "benchmarks.engines.pagemill", "the engine alone, offline")
QUEUED = Contender("queued", "benchmarks.engines.queued", "producer, Valkey and worker")


def same_tokens(measurements: Measurements, workload: str) -> tuple[int, int]:
    """(requests with equal output, requests), over all rounds."""
    queued, bare = (measurements.by_round(name, workload) for name in (QUEUED.name, BARE.name))
    pairs = [
        pair for n in queued if n in bare for pair in zip(queued[n].outputs, bare[n].outputs, strict=True)
    ]
    return sum(a == b for a, b in pairs), len(pairs)


def report(measurements: Measurements, workloads: Sequence[Workload]) -> dict[str, Any]:
    return {
        workload.name: {
            "requests": len(workload.prompts),
            "output_tokens": workload.num_output_tokens,
            "tokens_per_second": {
                name: [round(rate, 2) for rate in measurements.rates(name, workload.name)]
                for name in measurements.contenders
            },
            "share_of_bare": [
                round(share, 4) for share in measurements.ratios(QUEUED.name, BARE.name, workload.name)
            ],
            "same_tokens": same_tokens(measurements, workload.name),
        }
        for workload in workloads
    }


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    view = Table(title=f"The worker beside the bare engine (goal: {GOAL:.0%} of its throughput)")
    for column in ("workload", "bare tok/s", "queued tok/s", "share", "same tokens"):
        view.add_column(column, justify="left" if column == "workload" else "right")
    for workload in workloads:
        bare, queued = (statistics.median(measurements.rates(n, workload.name)) for n in ("bare", "queued"))
        equal, total = same_tokens(measurements, workload.name)
        share = Spread.of(measurements.ratios(QUEUED.name, BARE.name, workload.name))
        view.add_row(
            workload.name, f"{bare:.1f}", f"{queued:.1f}",
            f"{share.median:.1%} ({share.low:.1%}..{share.high:.1%})", f"{equal}/{total}",
        )  # fmt: skip
    return view


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.worker_overhead", description=__doc__)
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", default="smollm2", help="a folder, org/name of a hub, or smollm2")
    parser.add_argument("--share", type=float, default=1.0, help="share of the requests, for a dry run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-cache-gib", type=int, default=2)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    given = parser.parse_args(arguments)
    if given.rounds < 1 or not 0.0 < given.share <= 1.0:
        parser.error("--rounds must be at least 1 and --share in (0, 1]")
    if machine.is_busy():
        print("this machine is busy: the figures will be too low, and the shares doubtful", file=sys.stderr)
    model = model_directory(given.model)
    vocab_size = json.loads((model / "config.json").read_text())["vocab_size"]
    workloads = [WORKLOADS[name](vocab_size, given.seed, given.share) for name in given.workloads]
    request = throughput.build_request(
        str(model), vocab_size, workloads, seed=given.seed, share=given.share,
        kv_cache_gib=given.kv_cache_gib, options={},
    )  # fmt: skip
    console = Console(width=None if sys.stdout.isatty() else 120)
    started, where = datetime.now(UTC), machine.describe()
    measurements = Measurements()
    passes = throughput.measure_all(
        measurements, (BARE, QUEUED), request, workloads, vocab_size=vocab_size, rounds=given.rounds,
        console=console,
    )  # fmt: skip
    with contextlib.closing(passes):
        for _ in passes:
            pass
    if measurements.failures:
        return 1
    settings = {"rounds": given.rounds, "share": given.share, "seed": given.seed}
    results = {
        "question": "share of the bare engine's throughput that the whole product keeps",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "model": given.model,
        "settings": settings,
        "workloads": report(measurements, workloads),
    }
    path = given.out or result_path("worker-overhead", started)
    write(path, results)
    console.print(table(measurements, workloads))
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
