"""The cost of queue, worker and producer: the bare engine against all of them, on the same requests.

`python -m benchmarks.worker_overhead`. The sides make their passes in turns, as in `benchmarks.throughput`; the share
of the bare engine's throughput that is left is taken round by round, and all must generate the same tokens. The worker
runs both ways, its engine on a thread and in a process of its own. Processor time is told too: it holds on a machine
that others use as well. Client and server of the queue share it, as they share the machine.
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
QUEUED = tuple(
    Contender(
        name,
        "benchmarks.engines.queued",
        f"producer, Valkey and worker, its engine {where}",
        options=(("engine_process", value),),
    )
    for name, value, where in (
        ("thread", "off", "on a thread"),
        ("process", "on", "in a process of its own"),
    )
)


def same_tokens(measurements: Measurements, contender: str, workload: str) -> tuple[int, int]:
    """(requests with the bare engine's output, requests), over all rounds."""
    queued, bare = (measurements.by_round(name, workload) for name in (contender, BARE.name))
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
            **{way.name: against_bare(measurements, way.name, workload.name) for way in QUEUED},
        }
        for workload in workloads
    }


def against_bare(measurements: Measurements, contender: str, workload: str) -> dict[str, Any]:
    ratios = measurements.ratios, measurements.processor_ratios
    share, processor = ([round(one, 4) for one in of(contender, BARE.name, workload)] for of in ratios)
    return {
        "share_of_bare": share,
        "processor_time_over_bare": processor,
        "same_tokens": same_tokens(measurements, contender, workload),
    }


def table(measurements: Measurements, workloads: Sequence[Workload]) -> Table:
    view = Table(title=f"The worker beside the bare engine (goal: {GOAL:.0%} of its throughput)")
    for column in (
        "workload",
        "engine",
        "bare tok/s",
        "queued tok/s",
        "share",
        "processor time",
        "same tokens",
    ):
        view.add_column(column, justify="left" if column in ("workload", "engine") else "right")
    for workload in workloads:
        bare = statistics.median(measurements.rates(BARE.name, workload.name))
        for way in QUEUED:
            queued = statistics.median(measurements.rates(way.name, workload.name))
            equal, total = same_tokens(measurements, way.name, workload.name)
            share = Spread.of(measurements.ratios(way.name, BARE.name, workload.name))
            used = Spread.of(measurements.processor_ratios(way.name, BARE.name, workload.name))
            view.add_row(
                workload.name, way.name, f"{bare:.1f}", f"{queued:.1f}",
                f"{share.median:.1%} ({share.low:.1%}..{share.high:.1%})",
                f"{used.median:.3f} x ({used.low:.3f}..{used.high:.3f})", f"{equal}/{total}",
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
        measurements, (BARE, *QUEUED), request, workloads, vocab_size=vocab_size, rounds=given.rounds,
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
