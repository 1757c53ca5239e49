"""Do jobs end when their submit said? The share that ended by the promised p50 and p90, under three kinds of load.

One worker with a real model. `steady`: jobs come at random at two thirds of what the worker can do; `bursts`: three
times its rows at once, then nothing until half the time they need has passed again; `both`: bursts over a steady third.
Jobs generate 8 to 48 tokens. Nothing is known of a kind of load when it begins but what the one before it taught.

    python -m benchmarks.queues.promises
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.report import result_path, write
from pagemill import JobHandle, Producer
from pagemill.cli.local_worker import LocalWorker

QUEUE = "benchmark"
TOKENS = (8, 48)
CLOCK_S = 0.001
"""The queue's times are whole milliseconds: a promise may be none."""


@dataclass(frozen=True, slots=True)
class Load:
    """`rows` of the worker, and the jobs that it ends per second with all of them taken."""

    rows: int
    rate: float
    jobs: int
    seed: int = 1

    def steady(self, share: float = 2 / 3) -> Iterator[float]:
        rng = random.Random(self.seed)
        at = 0.0
        while True:
            at += rng.expovariate(share * self.rate)
            yield at

    def bursts(self) -> Iterator[float]:
        at = 0.0
        while True:
            yield from [at] * (3 * self.rows)
            at += 1.5 * 3 * self.rows / self.rate

    def both(self) -> Iterator[float]:
        steady, bursts = self.steady(1 / 3), self.bursts()
        one, other = next(steady), next(bursts)
        while True:
            if one < other:
                yield one
                one = next(steady)
            else:
                yield other
                other = next(bursts)


@dataclass(frozen=True, slots=True)
class Score:
    """One job. Seconds from its submit."""

    p50: float
    p90: float
    actual: float


def submit(producer: Producer, model: str, rng: random.Random) -> JobHandle:
    prompt = f"Row {rng.randrange(1000)} of the table, in other words: "
    return producer.submit(
        prompt=prompt * rng.randint(1, 4), model=model, max_tokens=rng.randint(*TOKENS), temperature=0.0, promise="flag"
    )  # fmt: skip


def warm_up(producer: Producer, model: str, rows: int) -> float:
    """Two full passes over the rows; returns the jobs that end per second."""
    rng = random.Random(0)
    rates = []
    for _ in range(2):
        began = time.perf_counter()
        for handle in [submit(producer, model, rng) for _ in range(4 * rows)]:
            handle.result()
        rates.append(4 * rows / (time.perf_counter() - began))
    return rates[-1]


def scores(producer: Producer, model: str, times: Iterator[float], jobs: int) -> list[Score]:
    """Submit jobs at those times; returns their scores once all have ended."""
    rng = random.Random(2)
    began = time.monotonic()
    handles = []
    for _ in range(jobs):
        time.sleep(max(0.0, began + next(times) - time.monotonic()))
        handles.append(submit(producer, model, rng))
    for handle in handles:
        handle.result()
    found = []
    for handle in handles:
        status, promise = handle.status(), handle.promise
        if promise is None or promise.p50 is None or promise.p90 is None or status.finished_at is None:
            raise RuntimeError(f"nothing was promised of job {handle.id}")
        since = status.created_at
        found.append(Score(promise.p50 - since, promise.p90 - since, status.finished_at - since))
    return found


def summary(found: list[Score]) -> dict[str, Any]:
    count = len(found)
    return {
        "jobs": count,
        "by_p50": round(sum(one.actual <= one.p50 for one in found) / count, 4),
        "by_p90": round(sum(one.actual <= one.p90 for one in found) / count, 4),
        "median_actual_s": round(statistics.median(one.actual for one in found), 3),
        "median_p50_s": round(statistics.median(one.p50 for one in found), 3),
        "median_p90_s": round(statistics.median(one.p90 for one in found), 3),
        "median_ratio": round(statistics.median(one.actual / max(one.p50, CLOCK_S) for one in found), 3),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--rows", type=int, default=8, help="sequences in a step")
    parser.add_argument("--jobs", type=int, default=192, help="of each kind of load")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results")
    given = parser.parse_args()
    at = datetime.now(UTC)
    options = ["--max-num-seqs", str(given.rows), "--http-port", "0"]
    measured: dict[str, list[Score]] = {}
    with (
        tempfile.TemporaryDirectory(prefix="pagemill-benchmark-") as state,
        LocalWorker(given.model, queue=QUEUE, state_dir=Path(state), options=options) as worker,
    ):
        url, info = worker.wait_ready()
        with Producer(url, queue=QUEUE) as producer:
            warm_up(producer, info.models[0], given.rows)
            time.sleep(3)  # until the worker has announced its speed
            load = Load(given.rows, warm_up(producer, info.models[0], given.rows), given.jobs)
            print(f"{load.rate:.2f} jobs per second", flush=True)
            kinds: tuple[Callable[[], Iterator[float]], ...] = (load.steady, load.bursts, load.both)
            for kind in kinds:
                measured[kind.__name__] = scores(producer, info.models[0], kind(), load.jobs)
                print(kind.__name__, summary(measured[kind.__name__]), flush=True)
    measured["all"] = [one for found in measured.values() for one in found]
    figures = {name: summary(found) for name, found in measured.items()}
    _show(figures)
    path = given.out or result_path("promises", at)
    report = {
        "question": "the share of jobs that ended by the promised p50 and p90",
        "date": at.isoformat(timespec="seconds"), "machine": machine.describe(), "model": given.model,
        "max_num_seqs": given.rows, "jobs_per_second": round(load.rate, 3), "loads": figures,
    }  # fmt: skip
    write(path, report)
    return 0


def _show(figures: dict[str, dict[str, Any]]) -> None:
    table = Table("load", "jobs", "by p50", "by p90", "median s", "promised p50", "promised p90")
    for name, row in figures.items():
        shares = (f"{row['by_p50']:.0%}", f"{row['by_p90']:.0%}")
        seconds = (f"{row[f'median_{what}_s']:.1f}" for what in ("actual", "p50", "p90"))
        table.add_row(name, str(row["jobs"]), *shares, *seconds)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
