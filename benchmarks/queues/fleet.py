"""The gain of more workers: real worker processes with an engine that only sleeps, on one queue and on a Cluster.

    python -m benchmarks.queues.fleet                  # 1, 2, 4 and 8 workers

The echo model takes a fixed time a step and no processor, so jobs per second grow with the workers until this machine
or the server is full. On a Cluster of three masters the jobs and the workers are spread over a queue of each.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import start_server
from benchmarks.report import RESULTS
from pagemill import Producer
from tests.chaos.nursery import Nursery
from tests.topologies import cluster_setup
from tests.worker.harness import eventually

PLACES = ("one queue", "cluster, three queues")
TEXT = "0123456789" * 5
ROWS = 16


@contextmanager
def place(name: str, directory: Path) -> Iterator[tuple[str, list[str]]]:
    """The URL and the queues of a server, or of a Cluster with a queue on each master."""
    if name == PLACES[0]:
        with start_server("valkey", directory) as url:
            yield url, ["fleet"]
    else:
        with cluster_setup(directory) as cluster:
            yield cluster.url, [cluster.queue_of(node) for node in range(len(cluster.nodes))]


def jobs_per_second(url: str, queues: Sequence[str], workers: int, jobs: int, step_ms: int) -> float:
    """Seconds from the first ended job to the last, without the workers' start and the submits."""
    settings = {"redis_url": url, "model": f"echo:{step_ms}", "max_num_seqs": ROWS, "http_port": 0}
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        producers = [stack.enter_context(Producer(url, queue=queue)) for queue in queues]
        share = max(1, jobs // len(queues))
        row = {"model": "echo", "prompt": TEXT, "max_tokens": len(TEXT), "tenant": f"fleet-{workers}"}
        batches = [producer.submit_many(row for _ in range(share)) for producer in producers]
        nursery = stack.enter_context(Nursery(directory, settings))
        for number in range(workers):
            nursery.spawn(queue=queues[number % len(queues)])

        def ended_now() -> int:
            return sum(batch.counts().ended for batch in batches)

        eventually(ended_now, "the first end", 300)
        began, before = time.perf_counter(), ended_now()
        for batch in batches:
            batch.wait(timeout=600)
        return (ended_now() - before) / (time.perf_counter() - began)


def measure(
    places: Sequence[str], workers: Sequence[int], jobs: int, step_ms: int
) -> dict[str, dict[int, float]]:
    """Jobs per second by place and number of workers; `jobs` for each worker."""
    rates: dict[str, dict[int, float]] = {}
    for name in places:
        with tempfile.TemporaryDirectory() as directory, place(name, Path(directory)) as (url, queues):
            for number in workers:
                # A queue without a worker would never end.
                used = queues[: min(number, len(queues))]
                rates.setdefault(name, {})[number] = jobs_per_second(
                    url, used, number, jobs * number, step_ms
                )
    return rates


def table(rates: dict[str, dict[int, float]]) -> Table:
    made = Table(title="jobs per second of real workers, by their number")
    made.add_column("workers", justify="right")
    for name in rates:
        made.add_column(name, justify="right")
    for number in next(iter(rates.values())):
        made.add_row(str(number), *(f"{by_number[number]:,.0f}" for by_number in rates.values()))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.fleet", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--places", nargs="+", choices=PLACES, default=list(PLACES))
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--jobs", type=int, default=300, help="for each worker")
    parser.add_argument("--step-ms", type=int, default=20)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    if machine.is_busy():
        print("this machine is busy: the figures will be too low", file=sys.stderr)
    started, where = datetime.now(UTC), machine.describe()
    rates = measure(arguments.places, arguments.workers, arguments.jobs, arguments.step_ms)
    Console(width=None if sys.stdout.isatty() else 120).print(table(rates))
    path = arguments.out or RESULTS / f"fleet-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {
        "question": "jobs per second of one to eight real workers",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "jobs_per_second": rates,
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
