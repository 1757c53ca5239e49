"""Does a released job find its parent's blocks? Prefix-cache hits of chains on several workers, with and without it.

Each document has a job that labels it and one that waits for that and begins alike: same instructions, same document.
They go through a real queue into the schedulers and prefix caches of several workers, whose model is `echo`: what is
measured is which tokens need no computing. Workers take turns at random, and each has room in its cache for a few
documents. "Anyone" is the same queue for jobs whose beginnings are not known to be alike.

    python -m benchmarks.queues.chains
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import redis
from rich.console import Console
from rich.table import Table

from benchmarks import machine
from benchmarks.queues.server import start_server
from benchmarks.report import RESULTS
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.calls import submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.transport import SyncTransport

MODEL = "echo"
OUTPUT_TOKENS = 4
QUESTION_TOKENS = 32
BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Chains:
    """Documents, all under the same instructions. Sizes are in tokens; here one is one byte."""

    documents: int
    instruction_tokens: int
    document_tokens: int
    seed: int

    def rows(self) -> Iterator[dict[str, Any]]:
        rng = random.Random(self.seed)
        instructions = _text(rng, self.instruction_tokens)
        for number in range(self.documents):
            begin = instructions + _text(rng, self.document_tokens)
            common = {"model": MODEL, "max_tokens": OUTPUT_TOKENS, "temperature": 0.0}
            label = {"key": f"{number}/label", "prompt": begin + _text(rng, QUESTION_TOKENS)}
            yield common | label
            summary = {"key": f"{number}/summary", "prompt": begin + _text(rng, QUESTION_TOKENS)}
            yield common | summary | {"after": [f"key:{number}/label"]}


@dataclass(frozen=True, slots=True)
class Fleet:
    workers: int
    num_seqs: int
    """Jobs that a worker runs at once; each of its turns takes that many at most."""
    cached_documents: int
    """Documents that a worker's cache has room for, beside what its jobs need."""


@dataclass(frozen=True, slots=True)
class Figures:
    """`at_home` of the waiting jobs ran where their parent had; `largest_wait` is in places, within their lane."""

    prompt_tokens: int
    hit_tokens: int
    at_home: int
    largest_wait: int

    @property
    def hit_ratio(self) -> float:
        return self.hit_tokens / self.prompt_tokens


def measure(chains: Chains, fleet: Fleet, transport: SyncTransport, *, near: bool) -> Figures:
    """Run all documents once."""
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    queue = f"chains-{near}-{fleet.workers}-{fleet.cached_documents}"
    items = list(
        Preparer(queue, "default", Keys()).items(chains.rows(), "b", on_invalid="raise", by_content=False)
    )
    if not near:
        items = [_of_another_beginning(item) for item in items]
    for start in range(0, len(items), 250):
        transport.run(submissions.submit(queue, items[start : start + 250], batch_id="b"))
    begin_tokens = chains.instruction_tokens + chains.document_tokens
    own_blocks = -(-(begin_tokens + QUESTION_TOKENS + OUTPUT_TOKENS) // BLOCK_SIZE) + 1
    blocks = fleet.cached_documents * (begin_tokens // BLOCK_SIZE) + fleet.num_seqs * own_blocks
    engines = [
        LLM(model=MODEL, num_kv_blocks=blocks, max_num_seqs=fleet.num_seqs, block_size=BLOCK_SIZE)
        for _ in range(fleet.workers)
    ]
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    rng = random.Random(chains.seed)
    ran_at: dict[str, int] = {}
    order: list[str] = []
    while len(order) < len(items):
        number = rng.randrange(fleet.workers)
        pull = transitions.pull(queue, f"w{number}", [MODEL], rng.randint(1, fleet.num_seqs), 1 << 40)
        jobs = transport.run(pull).jobs
        engines[number].generate([Job.from_payload(job.payload).prompt or "" for job in jobs], params)
        transport.run_many([_commit(queue, job) for job in jobs])
        ran_at |= {job.job_id: number for job in jobs}
        order += [job.job_id for job in jobs]
    parents = {item.job_id: json.loads(item.header).get("after") for item in items}
    summaries = [item.job_id for item in items if parents[item.job_id]]
    ranks = {job_id: rank for rank, job_id in enumerate(summaries)}
    taken = [job_id for job_id in order if job_id in ranks]
    caches = [engine.engine.stats().kv for engine in engines]
    return Figures(
        sum(cache.prefix_queried_tokens for cache in caches),
        sum(cache.prefix_hit_tokens for cache in caches),
        sum(ran_at[job_id] == ran_at[parents[job_id]] for job_id in summaries),
        max(place - ranks[job_id] for place, job_id in enumerate(taken)),
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.chains", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--documents", type=int, default=400)
    parser.add_argument("--instruction-tokens", type=int, default=512)
    parser.add_argument("--document-tokens", type=int, default=1024)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--num-seqs", type=int, default=16, help="jobs that a worker runs at once")
    parser.add_argument("--cached-documents", type=int, nargs="+", default=[0, 16])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    chains = Chains(
        arguments.documents, arguments.instruction_tokens, arguments.document_tokens, arguments.seed
    )
    rows: list[tuple[Fleet, Figures, Figures]] = []
    with tempfile.TemporaryDirectory() as directory, start_server("valkey", Path(directory)) as url:
        transport = SyncTransport(redis.Redis.from_url(url))
        for workers in arguments.workers:
            for cached in arguments.cached_documents:
                fleet = Fleet(workers, arguments.num_seqs, cached)
                anyone, near = (measure(chains, fleet, transport, near=near) for near in (False, True))
                rows.append((fleet, anyone, near))
        transport.close()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(rows, chains.documents))
    started = datetime.now(UTC)
    path = arguments.out or RESULTS / f"chains-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "question": "prompt tokens of chains found in the prefix cache, by which worker takes a released job",
        "date": started.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "rows": [
            {**asdict(fleet), "anyone": asdict(anyone), "near": asdict(near)} for fleet, anyone, near in rows
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {path}")
    return 0


def _table(rows: list[tuple[Fleet, Figures, Figures]], documents: int) -> Table:
    table = Table(
        title="prompt tokens that need no computing: anyone takes a released job / its parent's worker first"
    )
    for column in ("workers", "cached documents", "found", "ran at home", "tokens computed", "largest wait"):
        table.add_column(column, justify="right")
    for fleet, anyone, near in rows:
        computed = anyone.prompt_tokens - anyone.hit_tokens
        saved = 1.0 - (near.prompt_tokens - near.hit_tokens) / computed
        table.add_row(
            str(fleet.workers),
            str(fleet.cached_documents),
            f"{anyone.hit_ratio:.1%} / {near.hit_ratio:.1%}",
            f"{anyone.at_home / documents:.0%} / {near.at_home / documents:.0%}",
            f"{0.0 - saved:+.1%}",
            f"{anyone.largest_wait} / {near.largest_wait}",
        )
    return table


def _of_another_beginning(item: Submission) -> Submission:
    """Give jobs that wait one affinity, which their parents do not have."""
    header = json.loads(item.header)
    if "after" in header:
        header["affinity"] = "zzz"
    return Submission(item.job_id, json.dumps(header).encode(), item.payload, item.is_linked)


def _commit(queue: str, job: PulledJob) -> Any:
    result = Result(id=job.job_id, outputs=(Output(index=0, finish_reason="length"),), model=MODEL)
    return transitions.commit(queue, job.job_id, job.token, "succeeded", result.model_dump_json())


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))


if __name__ == "__main__":
    sys.exit(main())
