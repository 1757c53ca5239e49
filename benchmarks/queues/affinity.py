"""Does pulling jobs with a common prefix together pay, and what does it cost a pull?

A backlog whose system prompts are interleaved goes through a real queue into the real scheduler, block pool and prefix
cache, whose model is `echo`: what is measured is which tokens need no computing, not how fast a model is. The cache
holds a few of the prefixes, not all; that is where the order of jobs matters. Three orders: of arrival (jobs without an
affinity), by a window of 64 jobs (the pull script of the first release), and by the index of the lane. In an old
backlog every job has waited for more than 30 s, so every eighth job pulled is the one that has waited longest.

    python -m benchmarks.queues.affinity
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from itertools import cycle
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import redis
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import start_server, used_memory
from benchmarks.report import RESULTS
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.calls import submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.transport import SyncTransport
from tests.golden.released import released_script

if TYPE_CHECKING:
    from pagemill.engine.llm import LLM

MODEL = "echo"
OUTPUT_TOKENS = 4
BLOCK_SIZE = 16
CHUNK = 250
PLENTY = 1 << 40

Order = Literal["arrival", "window", "index"]
ORDERS: tuple[Order, ...] = ("arrival", "window", "index")


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs of `prefixes` system prompts by turns. Sizes are in tokens; here one is one byte."""

    prefixes: int
    jobs: int
    prefix_tokens: int
    question_tokens: int
    is_old: bool = False

    def rows(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(0)
        prefixes = cycle([_text(rng, self.prefix_tokens) for _ in range(self.prefixes)])
        for _ in range(self.jobs):
            yield {
                "model": MODEL,
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0.0,
                "prompt": next(prefixes) + _text(rng, self.question_tokens),
            }


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers that pull by turns, `num_seqs` jobs at once, each with room in its cache for some prefixes."""

    workers: int = 1
    num_seqs: int = 16
    cached_prefixes: int = 2

    def engines(self, backlog: Backlog) -> list[LLM]:
        from pagemill.engine.llm import LLM

        # Beside the prefixes, every running job has blocks of its own.
        own_blocks = -(-(backlog.question_tokens + OUTPUT_TOKENS) // BLOCK_SIZE) + 1
        blocks = self.cached_prefixes * (backlog.prefix_tokens // BLOCK_SIZE) + self.num_seqs * own_blocks
        return [
            LLM(model=MODEL, num_kv_blocks=blocks, max_num_seqs=self.num_seqs, block_size=BLOCK_SIZE)
            for _ in range(self.workers)
        ]


@dataclass(frozen=True, slots=True)
class Figures:
    """`largest_wait` is by how many places the job that fared worst was pulled later than it was submitted."""

    prompt_tokens: int
    hit_tokens: int
    largest_wait: int

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens


@dataclass(frozen=True, slots=True)
class PullTimes:
    """Of a pull of 16 jobs, in microseconds: of the server's processor, and as a round trip."""

    waiting: int
    order: Order
    processor: float
    """Median."""
    median: float
    p95: float
    longest: float
    index_bytes: int
    """Of the lane's index, at the end."""
    indexed: int
    """Jobs in it."""


class BenchmarkQueue:
    """A queue that is pulled from in one of the orders."""

    def __init__(self, name: str, transport: SyncTransport, order: Order) -> None:
        self.name = name
        self.transport = transport
        self.order = order

    def submit(self, rows: Iterator[dict[str, Any]], *, is_old: bool = False) -> list[str]:
        """Returns the ids."""
        preparer = Preparer(self.name, "default", Keys())
        items = list(preparer.items(rows, "b", on_invalid="raise", by_content=False))
        if self.order == "arrival":
            items = [_without_affinity(item) for item in items]
        for start in range(0, len(items), CHUNK):
            self.transport.run(submissions.submit(self.name, items[start : start + CHUNK]))
        if is_old:
            pipeline = self.transport.client.pipeline(transaction=False)
            for item in items:
                pipeline.hset(keys.job(self.name, item.job_id), "at", 1)
            pipeline.execute()
        return [item.job_id for item in items]

    def pull(self, worker: str, count: int) -> list[tuple[str, int, bytes]]:
        """Returns the id, token and payload of each job."""
        if self.order != "window":
            call = transitions.pull(self.name, worker, [MODEL], count, PLENTY)
            return [(job.job_id, job.token, job.payload) for job in self.transport.run(call).jobs]
        arguments = (worker, 6000, count, PLENTY, 0, 1 << 30, "1", MODEL)
        script = self.transport.client.register_script(released_script("pull"))
        jobs, *_ = script(keys=[keys.prefix(self.name)], args=arguments)
        return [(job[0].decode(), job[1], job[2]) for job in jobs]

    def commit(self, jobs: Sequence[tuple[str, int, bytes]]) -> None:
        self.transport.run_many([self._end_of(job_id, token) for job_id, token, _ in jobs])

    def _end_of(self, job_id: str, token: int) -> Any:
        result = Result(id=job_id, outputs=(Output(index=0, finish_reason="length"),), model=MODEL)
        return transitions.commit(self.name, job_id, token, "succeeded", result.model_dump_json())


def measure(backlog: Backlog, fleet: Fleet, transport: SyncTransport, order: Order) -> Figures:
    """Run the backlog once."""
    from pagemill.engine.sampling_params import SamplingParams

    transport.client.flushdb()
    queue = BenchmarkQueue("affinity", transport, order)
    ranks = {job_id: rank for rank, job_id in enumerate(queue.submit(backlog.rows(), is_old=backlog.is_old))}
    engines = fleet.engines(backlog)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    pulled, largest_wait = 0, 0
    for number, llm in cycle(enumerate(engines)):
        jobs = queue.pull(f"w{number}", fleet.num_seqs)
        if not jobs:
            break
        llm.generate([Job.from_payload(payload).prompt or "" for _, _, payload in jobs], params)
        for place, (job_id, _, _) in enumerate(jobs, pulled):
            largest_wait = max(largest_wait, place - ranks[job_id])
        pulled += len(jobs)
        queue.commit(jobs)
    if pulled != backlog.jobs:
        raise RuntimeError(f"{pulled} of {backlog.jobs} jobs came")
    caches = [llm.engine.stats().kv for llm in engines]
    return Figures(
        sum(cache.prefix_queried_tokens for cache in caches),
        sum(cache.prefix_hit_tokens for cache in caches),
        largest_wait,
    )


def time_pulls(transport: SyncTransport, order: Order, waiting: int, pulls: int, prefixes: int) -> PullTimes:
    """Two workers pull by turns; what they take is replaced, so that as many wait throughout."""
    transport.client.flushdb()
    queue = BenchmarkQueue("affinity", transport, order)
    rows = Backlog(prefixes, waiting + 16 * pulls, 300, 16).rows()
    queue.submit(row for _, row in zip(range(waiting), rows, strict=False))
    used_memory(transport.client)  # waits until the server has rewritten its file
    microseconds, processor = [], []
    asking = statistics.median(-_processor(transport) + _processor(transport) for _ in range(100))
    for number in range(pulls):
        used, started = _processor(transport), time.perf_counter()
        jobs = queue.pull(f"w{number % 2}", 16)
        microseconds.append((time.perf_counter() - started) * 1e6)
        processor.append((_processor(transport) - used - asking) * 1e6)
        queue.commit(jobs)
        queue.submit(row for _, row in zip(jobs, rows, strict=False))
    index = next(transport.client.scan_iter(f"{keys.prefix(queue.name)}alike:*", 1000), None)
    return PullTimes(
        waiting,
        order,
        statistics.median(processor),
        statistics.median(microseconds),
        statistics.quantiles(microseconds, n=20)[-1],
        max(microseconds),
        int(transport.client.memory_usage(index, samples=0) or 0) if index else 0,
        int(transport.client.zcard(index)) - 1 if index else 0,
    )


def _processor(transport: SyncTransport) -> float:
    """Seconds of the processor that the server has used."""
    used = transport.client.info("cpu")
    return float(used["used_cpu_user"] + used["used_cpu_sys"])


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.affinity", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--jobs", type=int, default=2048)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[4, 16, 64])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--question-tokens", type=int, default=128)
    parser.add_argument("--num-seqs", type=int, default=16, help="jobs that run at once")
    parser.add_argument(
        "--cached-prefixes", type=int, default=2, help="prefixes that a KV cache has room for"
    )
    parser.add_argument("--waiting", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--pulls", type=int, default=300)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows, times = [], []
    with tempfile.TemporaryDirectory() as directory, start_server("valkey", Path(directory)) as url:
        transport = SyncTransport(redis.Redis.from_url(url))
        for prefixes in arguments.prefixes:
            for is_old in (False, True):
                backlog = Backlog(
                    prefixes, arguments.jobs, arguments.prefix_tokens, arguments.question_tokens, is_old
                )
                for workers in arguments.workers:
                    fleet = Fleet(workers, arguments.num_seqs, arguments.cached_prefixes)
                    found = {order: measure(backlog, fleet, transport, order) for order in ORDERS}
                    rows.append((backlog, fleet, found))
        for waiting in arguments.waiting:
            for order in ORDERS:
                times.append(time_pulls(transport, order, waiting, arguments.pulls, arguments.prefixes[-1]))
        transport.close()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(rows), _times_table(times))
    started = datetime.now(UTC)
    path = arguments.out or RESULTS / f"affinity-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "question": "prompt tokens found in the prefix cache by the order of pulls, and the time of a pull",
        "date": started.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "rows": [
            {"prefixes": backlog.prefixes, "is_old": backlog.is_old, "workers": fleet.workers}
            | {order: asdict(figures) for order, figures in found.items()}
            for backlog, fleet, found in rows
        ],
        "pull_us": [asdict(row) for row in times],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {path}")
    return 0


def _table(rows: list[tuple[Backlog, Fleet, dict[Order, Figures]]]) -> Table:
    table = Table(title="prompt tokens found in the prefix cache, and the largest wait in places")
    for column in ("prefixes", "backlog", "workers", *ORDERS):
        table.add_column(column, justify="right")
    for backlog, fleet, found in rows:
        table.add_row(
            str(backlog.prefixes),
            "old" if backlog.is_old else "new",
            str(fleet.workers),
            *(f"{found[order].hit_ratio:.1%}, {found[order].largest_wait}" for order in ORDERS),
        )
    return table


def _times_table(times: list[PullTimes]) -> Table:
    table = Table(title="a pull of 16 jobs, us")
    for column in (
        "waiting",
        "order",
        "processor",
        "median",
        "p95",
        "longest",
        "bytes of the index",
        "jobs in it",
    ):
        table.add_column(column, justify="right")
    for row in times:
        figures = (row.processor, row.median, row.p95, row.longest, row.index_bytes, row.indexed)
        table.add_row(f"{row.waiting:,}", row.order, *(f"{figure:,.0f}" for figure in figures))
    return table


def _without_affinity(item: Submission) -> Submission:
    header = json.loads(item.header)
    header.pop("affinity", None)
    return Submission(item.job_id, json.dumps(header).encode(), item.payload)


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))


if __name__ == "__main__":
    sys.exit(main())
