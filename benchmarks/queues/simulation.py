"""The number of workers that one Redis serves: the real scripts on a real server, under simulated engines.

    python -m benchmarks.queues.simulation                            # 1,000,000 jobs, up to 1,000 workers
    python -m benchmarks.queues.simulation --jobs 20000 --workers 8 32 --stage-s 3

All jobs are submitted first. Then ever more workers take from them, a stage each, and the largest number of workers
does the rest. A worker offers `rows / service_s` jobs per second as long as the server keeps up; where more workers no
longer mean more jobs, the server is at its limit, or the machine is: the report says which.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import BINARIES, start_server
from benchmarks.queues.simulated_workers import BATCH, Load, Tally, serve
from benchmarks.report import RESULTS
from pagemill import Producer

SCRIPTS = ("pull", "checkpoint", "commit", "renew", "heartbeat")
FULL = 0.85
"""Of a core: a server that is busier than this serves no more."""
GROWTH = 0.5
"""A stage that gains less than this share of what its workers add is past the limit."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One number of workers. Rates are per second of the stage; latencies are a client's, waiting included."""

    workers: int
    offered_jobs_per_s: float
    jobs_per_s: float
    scripts_per_s: float
    server_cores: float
    server_us_per_script: float
    client_cores: float
    memory_mb: float
    lost_leases: int
    latency_ms: dict[str, dict[str, float]]
    """By script: p50, p90, p99, of a round trip that carries one or more calls of it."""


@dataclass(slots=True)
class Figures:
    jobs: int
    submit_s: float = 0.0
    bytes_per_waiting_job: float = 0.0
    stages: list[Stage] = field(default_factory=list)
    drain: Stage | None = None
    """The largest number of workers on what the stages left, to the end."""
    drain_s: float = 0.0
    peak_memory_mb: float = 0.0
    bytes_per_ended_job: float = 0.0
    ended: dict[str, int] = field(default_factory=dict)
    """The batch's own counts at the end: `succeeded` alone, if nothing went wrong."""
    ends_told: int = 0
    """Entries of the batch's feed: one for every job."""


@dataclass(frozen=True, slots=True)
class Limit:
    """The point where one server's throughput stops growing."""

    jobs_per_s: float
    workers: float | None
    """That many keep the server busy at the pace they were given; None: these were too few."""
    reached_by: str | None
    """server, or machine where the clients and whatever else runs there left the server no core of its own."""
    jobs_per_s_of_a_full_core: float
    """The rate that the server's CPU time per job allows, wherever the clients reached their limit first."""


class Clients:
    """The client processes, each with a share of the workers."""

    def __init__(self, pipes: Sequence[Connection]) -> None:
        self._pipes = pipes

    def submit(self, jobs: int) -> None:
        bounds = [jobs * i // len(self._pipes) for i in range(len(self._pipes) + 1)]
        self._order([("submit", start, end - start) for start, end in itertools.pairwise(bounds)])

    def work(self, workers: int, seconds: float | None) -> list[Tally]:
        shares = [workers // len(self._pipes)] * len(self._pipes)
        for index in range(workers % len(self._pipes)):
            shares[index] += 1
        return self._order([("work", share, seconds) for share in shares])

    def _order(self, orders: Sequence[tuple[Any, ...]]) -> list[Any]:
        for pipe, order in zip(self._pipes, orders, strict=True):
            pipe.send(order)
        return [pipe.recv() for pipe in self._pipes]


@contextmanager
def clients(url: str, load: Load, processes: int) -> Iterator[Clients]:
    context = multiprocessing.get_context("spawn")
    pipes, started = [], []
    for index in range(processes):
        ours, theirs = context.Pipe()
        process = context.Process(target=serve, args=(url, load, f"sim-{index}", theirs), daemon=True)
        process.start()
        theirs.close()
        pipes.append(ours)
        started.append(process)
    try:
        yield Clients(pipes)
    finally:
        for pipe in pipes:
            pipe.close()
        for process in started:
            process.join(timeout=30)
            process.kill()


class ServerMeter:
    """The server's CPU time between two readings."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._last = self._read()

    def _read(self) -> dict[str, float]:
        cpu, memory = self._client.info("cpu"), self._client.info("memory")
        scripts = self._client.info("commandstats").get("cmdstat_evalsha", {})
        # The main thread's alone where the server tells: it is the one that runs scripts.
        suffix = "_main_thread" if "used_cpu_user_main_thread" in cpu else ""
        return {
            "at": time.monotonic(),
            "cpu_s": cpu[f"used_cpu_user{suffix}"] + cpu[f"used_cpu_sys{suffix}"],
            "scripts": scripts.get("calls", 0),
            "script_us": scripts.get("usec", 0),
            "memory": memory["used_memory"],
            "peak": memory["used_memory_peak"],
        }

    def lap(self) -> dict[str, float]:
        """Since the last lap: at, cpu_s, scripts, script_us; and memory and peak as they are."""
        before, self._last = self._last, self._read()
        spent = {name: self._last[name] - before[name] for name in ("at", "cpu_s", "scripts", "script_us")}
        return spent | {"memory": self._last["memory"], "peak": self._last["peak"]}


def run_stage(fleet: Clients, meter: ServerMeter, load: Load, workers: int, seconds: float | None) -> Stage:
    meter.lap()
    tallies = fleet.work(workers, seconds)
    lap = meter.lap()
    took = max(tally.seconds for tally in tallies)
    commits = sum(tally.calls["commit"] for tally in tallies)
    return Stage(
        workers=workers,
        offered_jobs_per_s=workers * load.rows / load.service_s,
        jobs_per_s=commits / took,
        scripts_per_s=lap["scripts"] / lap["at"],
        server_cores=lap["cpu_s"] / lap["at"],
        server_us_per_script=lap["script_us"] / max(1.0, lap["scripts"]),
        client_cores=sum(tally.cpu_s for tally in tallies) / took,
        memory_mb=lap["memory"] / 1e6,
        lost_leases=sum((tally.replies for tally in tallies), Counter[str]())["lost"],
        latency_ms=latencies(tallies),
    )


def latencies(tallies: Sequence[Tally]) -> dict[str, dict[str, float]]:
    figures = {}
    for script in SCRIPTS:
        seconds = sorted(s for tally in tallies for s in tally.latencies_s.get(script, array("d")))
        if len(seconds) < 2:
            continue
        cuts = statistics.quantiles(seconds, n=100, method="inclusive")
        figures[script] = {f"p{share}": round(cuts[share - 1] * 1e3, 3) for share in (50, 90, 99)}
    return figures


def measure(
    url: str, load: Load, *, jobs: int, workers: Sequence[int], processes: int, stage_s: float
) -> Figures:
    """Submit, climb through the numbers of workers, do the rest. The server has nothing else on it."""
    figures = Figures(jobs)
    with redis.Redis.from_url(url) as client, clients(url, load, processes) as fleet:
        meter = ServerMeter(client)
        empty = meter.lap()["memory"]
        began = time.perf_counter()
        fleet.submit(jobs)
        figures.submit_s = time.perf_counter() - began
        figures.bytes_per_waiting_job = (meter.lap()["memory"] - empty) / jobs
        for number in sorted(workers):
            fleet.work(number, load.service_s)  # until jobs end as often as they begin
            figures.stages.append(run_stage(fleet, meter, load, number, stage_s))
        began = time.perf_counter()
        figures.drain = run_stage(fleet, meter, load, max(workers), None)
        figures.drain_s = time.perf_counter() - began
        end = meter.lap()
        figures.peak_memory_mb = end["peak"] / 1e6
        figures.bytes_per_ended_job = (end["memory"] - empty) / jobs
    with Producer(url, queue=load.queue) as producer:
        counts = producer.batch(BATCH).counts().model_dump()
    figures.ended = {state: number for state, number in counts.items() if number and state != "total"}
    with redis.Redis.from_url(url) as client:
        figures.ends_told = client.llen(f"pagemill:{{{load.queue}}}:bfeed:{BATCH}")
    return figures


def find_limit(stages: Sequence[Stage]) -> Limit:
    """Return the stage where throughput stops growing: it gains less than half of the added workers' share."""
    pace = stages[0].offered_jobs_per_s / stages[0].workers
    best = max(stages, key=lambda stage: stage.jobs_per_s)
    busiest = max(stages, key=lambda stage: stage.server_cores)
    of_a_core = busiest.jobs_per_s / max(busiest.server_cores, 1e-9)
    for last, stage in itertools.pairwise(stages):
        added = pace * (stage.workers - last.workers)
        if stage.jobs_per_s - last.jobs_per_s < GROWTH * added:
            full = "server" if stage.server_cores >= FULL else "machine"
            return Limit(best.jobs_per_s, best.jobs_per_s / pace, full, of_a_core)
    return Limit(best.jobs_per_s, None, None, of_a_core)


def tables(figures: Figures) -> list[Table]:
    """Rates by number of workers, and round trips by script."""
    rates = Table(
        title=f"one server, {figures.jobs:,} jobs: submitted at {figures.jobs / figures.submit_s:,.0f} a second,"
        f" {figures.bytes_per_waiting_job:,.0f} bytes each while waiting, {figures.bytes_per_ended_job:,.0f} ended"
    )
    trips = Table(title="round trips, ms: median / 99th percentile")
    columns = (
        "offered jobs/s",
        "jobs/s",
        "scripts/s",
        "us a script",
        "server cores",
        "client cores",
        "memory MB",
    )
    for made, names in ((rates, columns), (trips, SCRIPTS)):
        made.add_column("workers", justify="right")
        for name in names:
            made.add_column(name, justify="right")
    for stage in figures.stages + ([figures.drain] if figures.drain is not None else []):
        name = f"{stage.workers:,}" if stage is not figures.drain else f"{stage.workers:,}, to the end"
        rates.add_row(
            name,
            f"{stage.offered_jobs_per_s:,.0f}",
            f"{stage.jobs_per_s:,.0f}",
            f"{stage.scripts_per_s:,.0f}",
            f"{stage.server_us_per_script:.0f}",
            f"{stage.server_cores:.2f}",
            f"{stage.client_cores:.2f}",
            f"{stage.memory_mb:,.0f}",
        )
        trips.add_row(name, *(_pair(stage.latency_ms.get(script)) for script in SCRIPTS))
    return [rates, trips]


def _pair(figures: dict[str, float] | None) -> str:
    return "-" if figures is None else f"{figures['p50']:.1f} / {figures['p99']:.1f}"


def verdict(limit: Limit) -> str:
    """The answer in a line."""
    core = f"a full core of the server is worth {limit.jobs_per_s_of_a_full_core:,.0f} jobs/s"
    if limit.workers is None:
        return f"throughput still grew at {limit.jobs_per_s:,.0f} jobs/s: more workers would show the limit; {core}"
    return (
        f"throughput stops growing at {limit.workers:,.0f} workers, {limit.jobs_per_s:,.0f} jobs/s,"
        f" where the {limit.reached_by} had no more to give; {core}"
    )


def is_sound(figures: Figures) -> bool:
    """Every job has one result."""
    return figures.ended == {"succeeded": figures.jobs} and figures.ends_told == figures.jobs


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.simulation", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--server", choices=list(BINARIES), default="valkey")
    parser.add_argument("--jobs", type=int, default=1_000_000)
    parser.add_argument("--workers", type=int, nargs="+", default=[30, 60, 125, 250, 500, 1000])
    parser.add_argument("--stage-s", type=float, default=15.0, help="seconds that are measured of each stage")
    parser.add_argument("--processes", type=int, default=max(2, (os.cpu_count() or 2) - 1), help="of clients")
    load = Load()
    parser.add_argument("--rows", type=int, default=load.rows, help="jobs that a worker runs at once")
    parser.add_argument("--service-s", type=float, default=load.service_s, help="a job's time in the engine")
    parser.add_argument("--prompt-bytes", type=int, default=load.prompt_bytes)
    parser.add_argument("--tenants", type=int, default=load.tenants)
    parser.add_argument("--out", type=Path, help="JSON file; default: a dated one under benchmarks/results")
    return parser.parse_args()


def main() -> int:
    arguments = _parse()
    if machine.is_busy():
        print("this machine is busy: the figures will be too low", file=sys.stderr)
    load = Load(
        rows=arguments.rows, service_s=arguments.service_s,
        prompt_bytes=arguments.prompt_bytes, tenants=arguments.tenants,
    )  # fmt: skip
    started, where = datetime.now(UTC), machine.describe()
    with tempfile.TemporaryDirectory() as directory, start_server(arguments.server, Path(directory)) as url:
        figures = measure(
            url, load, jobs=arguments.jobs, workers=arguments.workers,
            processes=arguments.processes, stage_s=arguments.stage_s,
        )  # fmt: skip
    limit = find_limit(figures.stages)
    console = Console(width=None if sys.stdout.isatty() else 120)
    for made in tables(figures):
        console.print(made)
    console.print(verdict(limit))
    path = arguments.out or RESULTS / f"simulation-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "question": "workers, jobs and scripts per second that one Redis server carries",
        "date": started.isoformat(timespec="seconds"),
        "machine": where,
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "load": asdict(load),
        "limit": asdict(limit),
        **asdict(figures),
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    print(f"written to {path}")
    if not is_sound(figures):
        print(f"of {figures.jobs:,} jobs ended {figures.ended}, told {figures.ends_told:,}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
