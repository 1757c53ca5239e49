"""Rates of jobs into the queue and out of it, their cost, and the same work with other queues.

    python -m benchmarks.queues.rates [--waiting 100000 1000000]

Submit: a job has a 500-byte prompt. Every contender runs on the same server (append-only file, written once
per second), round by round, so the ratios of one run are comparable. Celery and rq are measured if they are
installed (`pip install 'pagemill[bench]'`). Pull: the cost of one pull with an empty queue and with full
ones, and the jobs per second that several workers' connections pull and commit. Every rate is reported by
wall-clock and by CPU time, which is also valid on a busy machine. In a bulk submit the client and the server
work in parallel, so the busier one determines its rate. The other contenders wait for each reply.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import redis
from rich.table import Table

from benchmarks import report
from benchmarks.queues.drain import Drained, drain, processor_seconds
from benchmarks.queues.server import kinds, start_server, used_memory
from pagemill import Producer
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.server.transport import SyncTransport

PROMPT_BYTES = 500
ENVELOPE_BYTES = 121
"""Approximate bytes of a payload in addition to its prompt."""
MODEL = "m"
PULLED_AT_ONCE = 16

Submit = Callable[[str, int], None]
"""(server's URL, jobs): returns when all are accepted."""


@dataclass(frozen=True, slots=True)
class Cost:
    """CPU time per job, in microseconds."""

    client_us: float
    server_us: float

    def rate(self, *, side_by_side: bool) -> float:
        """Jobs per second if no other process used the two CPUs."""
        both = (self.client_us, self.server_us)
        return 1e6 / (max(both) if side_by_side else sum(both))


@dataclass(slots=True)
class Figures:
    """Results of one server. Rates are jobs per second, one per round."""

    server: str
    rates: dict[str, list[float]] = field(default_factory=dict)
    costs: dict[str, list[Cost]] = field(default_factory=dict)
    drained: list[Drained] = field(default_factory=list)
    bytes_per_job: dict[str, float] = field(default_factory=dict)
    """By number of waiting jobs, and their size."""
    pull_us: dict[str, float] = field(default_factory=dict)
    """Median microseconds of one pull, including the round trip."""
    pull_server_us: dict[str, float] = field(default_factory=dict)
    """Median CPU time of the server for one pull."""

    def rate(self, name: str) -> float:
        return statistics.median(self.rates[name])

    def processor_rate(self, name: str) -> float:
        """`rate` by CPU time."""
        side_by_side = name == "submit_many"
        return statistics.median(cost.rate(side_by_side=side_by_side) for cost in self.costs[name])


@dataclass(frozen=True, slots=True)
class Goal:
    """A goal of the queue, and its results by measurement: clock, CPU time, or a counter."""

    name: str
    wanted: float
    found: dict[str, float]
    is_least: bool = True

    @property
    def reached(self) -> dict[str, bool]:
        return {
            way: value >= self.wanted if self.is_least else value <= self.wanted
            for way, value in self.found.items()
        }

    @property
    def title(self) -> str:
        return f"{self.name} {'>=' if self.is_least else '<='} {self.wanted:g}"

    def as_json(self) -> dict[str, Any]:
        figures = {name: round(value, 2) for name, value in self.found.items()}
        return {"goal": self.title, **figures, "reached": self.reached}


def rows(count: int, prompt_bytes: int = PROMPT_BYTES) -> Iterator[dict[str, Any]]:
    for i in range(count):
        text = f"Row {i}: "
        yield {
            "model": MODEL,
            "prompt": text + "x" * (prompt_bytes - len(text)),
            "max_tokens": 16,
            "temperature": 0.0,
        }


def submit_many(url: str, count: int, prompt_bytes: int = PROMPT_BYTES) -> None:
    with Producer(url, queue="bulk") as producer:
        producer.submit_many(rows(count, prompt_bytes))


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
    # name: (the measured function, its module, share of the jobs: the slow ones need fewer)
    "submit_many": (submit_many, None, 1.0),
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
                submit(url, min(50, count))  # connections, scripts and imports are not measured
                server, mine = processor_seconds(client), time.process_time()
                started = time.perf_counter()
                submit(url, count)
                figures.rates.setdefault(name, []).append(count / (time.perf_counter() - started))
                mine, server = time.process_time() - mine, processor_seconds(client) - server
                cost = Cost(mine / count * 1e6, server / count * 1e6)
                figures.costs.setdefault(name, []).append(cost)
                client.flushdb()


def measure_memory(figures: Figures, url: str, waiting: Sequence[int], pulls: int) -> None:
    """Fill the queue step by step; the jobs stay in the queue."""
    with redis.Redis.from_url(url) as client:
        for prompt_bytes in (PROMPT_BYTES - ENVELOPE_BYTES, PROMPT_BYTES):
            submit_many(url, 50)
            client.flushdb()
            before, there = used_memory(client), 0
            for depth in waiting if prompt_bytes == PROMPT_BYTES else waiting[:1]:
                submit_many(url, depth - there, prompt_bytes)
                there = depth
                taken = (used_memory(client) - before) / depth
                figures.bytes_per_job[f"{depth} waiting, prompts of {prompt_bytes} bytes"] = taken
                if prompt_bytes == PROMPT_BYTES:
                    measure_pulls(figures, url, f"{depth} waiting", pulls)


def measure_pulls(figures: Figures, url: str, name: str, pulls: int) -> None:
    """Pull and requeue, so that the queue's length does not change."""
    with redis.Redis.from_url(url) as client:
        transport = SyncTransport(client)
        pull = transitions.pull("bulk", "w", [MODEL], PULLED_AT_ONCE, 1 << 40)
        transport.run(transitions.pull("bulk", "w", [MODEL], 0, 1 << 40))
        seconds, server, asked = [], [], []
        for _ in range(pulls):
            idle, before, started = processor_seconds(client), processor_seconds(client), time.perf_counter()
            jobs = transport.run(pull).jobs
            seconds.append(time.perf_counter() - started)
            server.append(processor_seconds(client) - before)
            asked.append(before - idle)
            transport.run_many([transitions.release("bulk", job.job_id, job.token) for job in jobs])
        figures.pull_us[name] = statistics.median(seconds) * 1e6
        figures.pull_server_us[name] = (statistics.median(server) - statistics.median(asked)) * 1e6


def measure_drain(figures: Figures, url: str, arguments: argparse.Namespace) -> None:
    with redis.Redis.from_url(url) as client:
        for _ in range(arguments.rounds):
            client.flushdb()
            submit_many(url, arguments.jobs)
            figures.drained.append(drain(url, "bulk", MODEL, arguments.workers, arguments.at_once))
        client.flushdb()


def measure(kind: str, arguments: argparse.Namespace) -> Figures:
    figures = Figures(kind)
    with tempfile.TemporaryDirectory() as directory, start_server(kind, Path(directory)) as url:
        measure_submits(figures, url, arguments.jobs, arguments.rounds)
        measure_drain(figures, url, arguments)
        measure_pulls(figures, url, "nothing waiting", arguments.pulls)
        submit_many(url, PULLED_AT_ONCE)
        measure_pulls(figures, url, f"{PULLED_AT_ONCE} waiting", arguments.pulls)
        measure_memory(figures, url, arguments.waiting, arguments.pulls)
    return figures


def goals(figures: Figures) -> list[Goal]:
    """Return the goals of the queue, with this server's results."""

    def both(clock: float, processor: float) -> dict[str, float]:
        return {"by_clock": clock, "by_processor": processor}

    found = []
    for name, wanted in (("celery send_task", 30), ("rq enqueue_many", 10)):
        if name in figures.rates:
            rates = (ours("submit_many") / ours(name) for ours in (figures.rate, figures.processor_rate))
            found.append(Goal(f"submit_many over {name}, times", wanted, both(*rates)))
    drained = [(each.rate, each.server_rate) for each in figures.drained]
    medians = (statistics.median(way) for way in zip(*drained, strict=True))
    found.append(Goal("pulls and commits a second", 20_000, both(*medians)))
    for name, taken in figures.bytes_per_job.items():
        found.append(Goal(f"bytes a job, {name}", 900, {"counted": taken}, is_least=False))
    few, *_, most = list(figures.pull_us)[1:]
    ratios = (way[most] / way[few] for way in (figures.pull_us, figures.pull_server_us))
    found.append(Goal(f"a pull with {most} over one with {few}, times", 1.25, both(*ratios), is_least=False))
    return found


def table(measured: list[Figures]) -> Table:
    made = report.table("the queue; jobs with 500-byte prompts", ("",), [each.server for each in measured])
    for name in CONTENDERS:
        if any(name in figures.rates for figures in measured):
            rates = (f"{f.rate(name):,.0f}" if name in f.rates else "-" for f in measured)
            costs = (_costs(f.costs[name]) if name in f.costs else "-" for f in measured)
            made.add_row(f"{name}, jobs/s", *rates)
            made.add_row("  processor: client + server, us a job", *costs)
    drained = [sorted(f.drained, key=lambda each: each.rate)[len(f.drained) // 2] for f in measured]
    made.add_row("pulled and committed, jobs/s", *(f"{each.rate:,.0f}" for each in drained))
    costs = (f"{each.workers_us:.1f} + {each.server_us:.1f}" for each in drained)
    made.add_row("  processor: workers + server, us a job", *costs)
    for name in measured[0].bytes_per_job:
        made.add_row(f"bytes a job, {name}", *(f"{f.bytes_per_job[name]:,.0f}" for f in measured))
    for name in measured[0].pull_us:
        pulls = (f"{f.pull_us[name]:,.0f} ({f.pull_server_us[name]:,.0f})" for f in measured)
        made.add_row(f"pull of {PULLED_AT_ONCE}, {name}, us (processor)", *pulls)
    return made


def _costs(costs: list[Cost]) -> str:
    client, server = (
        statistics.median(side) for side in zip(*((c.client_us, c.server_us) for c in costs), strict=True)
    )
    return f"{client:.1f} + {server:.1f}"


def goal_table(measured: list[Figures]) -> Table:
    title = "goals: by the clock, by processor time"
    made = report.table(title, ("",), [figures.server for figures in measured])
    for row in zip(*map(goals, measured), strict=True):
        made.add_row(row[0].title, *(_told(goal) for goal in row))
    return made


def _told(goal: Goal) -> str:
    pairs = zip(goal.found.values(), goal.reached.values(), strict=True)
    return ", ".join(f"{value:,.1f} {'yes' if reached else 'no'}" for value, reached in pairs)


def parser() -> argparse.ArgumentParser:
    made = report.parser(__doc__, model=False)
    made.add_argument("--servers", nargs="+", choices=kinds(), default=kinds())
    made.add_argument("--jobs", type=int, default=40_000, help="jobs of one timed bulk submit, or drained")
    made.add_argument(
        "--waiting", type=int, nargs="+", default=[100_000],
        help="depths, rising, at which memory and pulls are measured",
    )  # fmt: skip
    made.add_argument("--pulls", type=int, default=500)
    made.add_argument("--rounds", type=int, default=3)
    made.add_argument("--workers", type=int, default=4, help="connections that drain a queue")
    made.add_argument("--at-once", type=int, default=64, help="jobs that each of them pulls, and commits")
    return made


def as_json(figures: Figures) -> dict[str, Any]:
    return {
        "goals": [goal.as_json() for goal in goals(figures)],
        "jobs_per_second": figures.rates,
        "processor_us_per_job": {
            name: [asdict(cost) for cost in costs] for name, costs in figures.costs.items()
        },
        "drained": [asdict(drained) | {"rate": drained.rate} for drained in figures.drained],
        "bytes_per_job": {name: round(value, 1) for name, value in figures.bytes_per_job.items()},
        "pull_us": {name: round(value, 1) for name, value in figures.pull_us.items()},
        "pull_server_us": {name: round(value, 1) for name, value in figures.pull_server_us.items()},
    }


def main() -> int:
    arguments, console = parser().parse_args(), report.console()
    question = "jobs per second into the queue, their memory there, and what a pull takes"
    file = report.Report("queue", question, arguments)
    measured = [measure(kind, arguments) for kind in arguments.servers]
    console.print(table(measured))
    console.print(goal_table(measured))
    file.write({"servers": {figures.server: as_json(figures) for figures in measured}})
    console.print(f"written to {file.path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
