"""Rates of jobs into the queue and out of it, their cost there, and the same work by other queues.

    python -m benchmarks.queues.rates

Submitting: a job has a 500-byte prompt; every contender runs on the same server (append-only file, written once a
second), round by round, so that the ratios of one run count. Celery and rq are measured when they are installed
(`pip install 'pagemill[bench]'`). Pulling: what one pull costs beside an empty queue and beside a full one.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import kinds, start_server, used_memory
from benchmarks.report import RESULTS
from pagemill import Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.server.transport import SyncTransport

PROMPT_BYTES = 500
MODEL = "m"
PULLED_AT_ONCE = 16

Submit = Callable[[str, int], None]
"""(server's URL, jobs): returns when all are accepted."""


@dataclass(slots=True)
class Figures:
    """Of one server. Rates are jobs per second, one per round."""

    server: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    bytes_per_job: float = 0.0
    waiting_megabytes: float = 0.0
    """The size of the waiting jobs of the memory measurement, in 10^6 bytes."""
    pull_us: dict[str, float] = field(default_factory=dict)
    """Microseconds of one pull, round trip included: median."""

    def rate(self, name: str) -> float:
        return statistics.median(self.rates[name])


def rows(count: int) -> Iterator[dict[str, Any]]:
    for i in range(count):
        text = f"Row {i}: "
        yield {
            "model": MODEL,
            "prompt": text + "x" * (PROMPT_BYTES - len(text)),
            "max_tokens": 16,
            "temperature": 0.0,
        }


def submit_many(url: str, count: int) -> None:
    with Producer(url, queue="bulk") as producer:
        producer.submit_many(rows(count))


def submit_one_by_one(url: str, count: int) -> None:
    with Producer(url, queue="single") as producer:
        for row in rows(count):
            producer.submit(row)


def celery_send_task(url: str, count: int) -> None:
    from celery import Celery

    app = Celery("bench", broker=url)
    app.conf.task_ignore_result = True
    with app.connection_for_write() as connection, app.amqp.Producer(connection) as producer:
        for row in rows(count):
            app.send_task("generate", kwargs=row, producer=producer)


def rq_enqueue_many(url: str, count: int) -> None:
    from rq import Queue

    with redis.Redis.from_url(url) as client:
        queue = Queue("rq", connection=client)
        chunk: list[Any] = []
        for row in rows(count):
            chunk.append(Queue.prepare_data("bench.generate", kwargs=row))
            if len(chunk) == 250:
                queue.enqueue_many(chunk)
                chunk = []
        if chunk:
            queue.enqueue_many(chunk)


CONTENDERS: dict[str, tuple[Submit, str | None, float]] = {
    # name: (what is timed, the module it needs, share of the jobs: the slow ones need fewer)
    "submit_many": (submit_many, None, 1.0),
    "submit": (submit_one_by_one, None, 0.1),
    "celery send_task": (celery_send_task, "celery", 0.05),
    "rq enqueue_many": (rq_enqueue_many, "rq", 0.25),
}


def measure_submits(figures: Figures, url: str, jobs: int, rounds: int) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(rounds):
            for name, (submit, module, share) in CONTENDERS.items():
                if module is not None and find_spec(module) is None:
                    continue
                count = max(1, round(jobs * share))
                submit(url, min(50, count))  # connections, scripts and imports are not what is measured
                started = time.perf_counter()
                submit(url, count)
                figures.rates.setdefault(name, []).append(count / (time.perf_counter() - started))
                client.flushdb()


def measure_memory(figures: Figures, url: str, waiting: int) -> None:
    """Leaves the jobs where they are."""
    with redis.Redis.from_url(url) as client:
        submit_many(url, 50)
        client.flushdb()
        before = used_memory(client)
        submit_many(url, waiting)
        used = used_memory(client) - before
    figures.bytes_per_job = used / waiting
    figures.waiting_megabytes = used / 1e6


def measure_pulls(figures: Figures, url: str, name: str, pulls: int) -> None:
    """Pull and hand back, so that the queue stays as full as it is."""
    with redis.Redis.from_url(url) as client:
        transport = SyncTransport(client)
        pull = transitions.pull("bulk", "w", [MODEL], PULLED_AT_ONCE, 1 << 40)
        seconds = []
        for _ in range(pulls):
            started = time.perf_counter()
            jobs = transport.run(pull).jobs
            seconds.append(time.perf_counter() - started)
            transport.run_many([transitions.release("bulk", job.job_id, job.token) for job in jobs])
        figures.pull_us[name] = statistics.median(seconds) * 1e6


def measure(kind: str, jobs: int, waiting: int, pulls: int, rounds: int) -> Figures:
    figures = Figures(kind)
    with tempfile.TemporaryDirectory() as directory, start_server(kind, Path(directory)) as url:
        measure_submits(figures, url, jobs, rounds)
        measure_pulls(figures, url, "nothing waiting", pulls)
        submit_many(url, PULLED_AT_ONCE)
        measure_pulls(figures, url, f"{PULLED_AT_ONCE} waiting", pulls)
        measure_memory(figures, url, waiting)
        measure_pulls(figures, url, f"{waiting} waiting", pulls)
    return figures


def table(measured: list[Figures], waiting: int) -> Table:
    made = Table(title="the queue; jobs with 500-byte prompts")
    made.add_column("")
    for figures in measured:
        made.add_column(figures.server, justify="right")
    for name in CONTENDERS:
        if any(name in figures.rates for figures in measured):
            made.add_row(
                f"{name}, jobs/s", *(f"{f.rate(name):,.0f}" if name in f.rates else "-" for f in measured)
            )
    for name in ("celery send_task", "rq enqueue_many"):
        if any(name in figures.rates for figures in measured):
            ratios = (
                f"{f.rate('submit_many') / f.rate(name):.1f} x" if name in f.rates else "-" for f in measured
            )
            made.add_row(f"submit_many over {name}", *ratios)
    made.add_row("bytes per waiting job", *(f"{f.bytes_per_job:,.0f}" for f in measured))
    made.add_row(f"{waiting:,} waiting jobs, MB", *(f"{f.waiting_megabytes:.1f}" for f in measured))
    for name in measured[0].pull_us:
        made.add_row(f"pull of {PULLED_AT_ONCE}, {name}, us", *(f"{f.pull_us[name]:,.0f}" for f in measured))
    return made


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.rates", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--servers", nargs="+", choices=kinds(), default=kinds())
    parser.add_argument("--jobs", type=int, default=40_000, help="jobs of one timed bulk submit")
    parser.add_argument("--waiting", type=int, default=100_000, help="jobs of the memory measurement")
    parser.add_argument("--pulls", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    arguments = parser.parse_args()
    console = Console(width=None if sys.stdout.isatty() else 120)
    if machine.is_busy():
        print("this machine is busy: the figures will be too low, and the ratios doubtful", file=sys.stderr)
    started, where = datetime.now(UTC), machine.describe()
    measured = [
        measure(kind, arguments.jobs, arguments.waiting, arguments.pulls, arguments.rounds)
        for kind in arguments.servers
    ]
    console.print(table(measured, arguments.waiting))
    path = arguments.out or RESULTS / f"queue-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "question": "jobs per second into the queue, their memory there, and what a pull takes",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "servers": {
            figures.server: {
                "jobs_per_second": figures.rates,
                "bytes_per_job": round(figures.bytes_per_job, 1),
                "waiting_megabytes": round(figures.waiting_megabytes, 2),
                "pull_us": {name: round(value, 1) for name, value in figures.pull_us.items()},
            }
            for figures in measured
        },
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
