"""Does pulling jobs with a common prefix together pay? Prefix-cache hits with and without it.

A mixed backlog - several system prompts, their jobs shuffled - goes through a real queue into the real scheduler,
block pool and prefix cache, whose model is `echo`: what is measured is which tokens need no computing, not how fast
a model is. The cache holds a few of the prefixes, not all; that is where the order of jobs matters.

    python -m benchmarks.queues.affinity
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
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
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob, Submission
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.transport import SyncTransport

MODEL = "echo"
OUTPUT_TOKENS = 4


@dataclass(frozen=True, slots=True)
class Backlog:
    """Jobs of `prefixes` system prompts in random order. Sizes are in tokens; here one is one byte."""

    prefixes: int
    jobs: int
    prefix_tokens: int
    question_tokens: int
    seed: int

    def rows(self) -> list[dict[str, Any]]:
        rng = random.Random(self.seed)
        prefixes = [_text(rng, self.prefix_tokens) for _ in range(self.prefixes)]
        return [
            {
                "model": MODEL,
                "max_tokens": OUTPUT_TOKENS,
                "temperature": 0.0,
                "prompt": rng.choice(prefixes) + _text(rng, self.question_tokens),
            }
            for _ in range(self.jobs)
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


def measure(
    backlog: Backlog, transport: SyncTransport, *, with_affinity: bool, num_seqs: int, cached_prefixes: int
) -> Figures:
    """Run the backlog once, `num_seqs` jobs at a time, in a cache with room for this many prefixes."""
    from pagemill.engine.llm import LLM
    from pagemill.engine.sampling_params import SamplingParams

    queue = f"affinity-{with_affinity}-{backlog.prefixes}"
    preparer = Preparer(queue, "default", Keys())
    items = list(preparer.items(backlog.rows(), "b", on_invalid="raise", by_content=False))
    if not with_affinity:
        items = [_without_affinity(item) for item in items]
    for start in range(0, len(items), 250):
        transport.run(transitions.submit(queue, items[start : start + 250], batch_id="b"))
    ranks = {item.job_id: rank for rank, item in enumerate(items)}
    block_size = 16
    # Beside the prefixes, every running job has blocks of its own.
    own_blocks = -(-(backlog.question_tokens + OUTPUT_TOKENS) // block_size) + 1
    blocks = cached_prefixes * (backlog.prefix_tokens // block_size) + num_seqs * own_blocks
    llm = LLM(model=MODEL, num_kv_blocks=blocks, max_num_seqs=num_seqs, block_size=block_size)
    params = SamplingParams(max_tokens=OUTPUT_TOKENS, temperature=0.0)
    pulled_before, largest_wait = 0, 0
    while jobs := transport.run(transitions.pull(queue, "w", [MODEL], num_seqs, 1 << 40)).jobs:
        prompts = [Job.from_payload(job.payload).prompt or "" for job in jobs]
        llm.generate(prompts, params)
        for place, job in enumerate(jobs, pulled_before):
            largest_wait = max(largest_wait, place - ranks[job.job_id])
        pulled_before += len(jobs)
        transport.run_many([_commit(queue, job) for job in jobs])
    if pulled_before != backlog.jobs:
        raise RuntimeError(f"{pulled_before} of {backlog.jobs} jobs came")
    cache = llm.engine.stats().kv
    return Figures(cache.prefix_queried_tokens, cache.prefix_hit_tokens, largest_wait)


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.queues.affinity", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1, 2, 4, 8, 16])
    parser.add_argument("--prefix-tokens", type=int, default=1024)
    parser.add_argument("--question-tokens", type=int, default=128)
    parser.add_argument("--num-seqs", type=int, default=16, help="jobs that run at once")
    parser.add_argument(
        "--cached-prefixes", type=int, default=2, help="prefixes that the KV cache has room for"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as directory, start_server("valkey", Path(directory)) as url:
        transport = SyncTransport(redis.Redis.from_url(url))
        for prefixes in arguments.prefixes:
            backlog = Backlog(
                prefixes, arguments.jobs, arguments.prefix_tokens, arguments.question_tokens, arguments.seed
            )
            plain, together = (
                measure(
                    backlog,
                    transport,
                    with_affinity=with_affinity,
                    num_seqs=arguments.num_seqs,
                    cached_prefixes=arguments.cached_prefixes,
                )
                for with_affinity in (False, True)
            )
            rows.append((prefixes, plain, together))
        transport.close()
    console = Console(width=None if sys.stdout.isatty() else 120)
    console.print(_table(rows))
    started = datetime.now(UTC)
    path = arguments.out or RESULTS / f"affinity-{started:%Y%m%dT%H%M%SZ}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "question": "prompt tokens found in the prefix cache, with and without prefix affinity",
        "date": started.isoformat(timespec="seconds"),
        "machine": machine.describe(),
        "settings": {name: value for name, value in vars(arguments).items() if name != "out"},
        "rows": [
            {"prefixes": prefixes, "in_order": asdict(plain), "with_affinity": asdict(together)}
            for prefixes, plain, together in rows
        ],
    }
    path.write_text(json.dumps(report, indent=2) + "\n")
    console.print(f"written to {path}")
    return 0


def _table(rows: list[tuple[int, Figures, Figures]]) -> Table:
    table = Table(title="prompt tokens that need no computing")
    for column in ("prefixes", "in order", "with affinity", "tokens computed", "largest wait, places"):
        table.add_column(column, justify="right")
    for prefixes, plain, together in rows:
        computed = plain.prompt_tokens - plain.hit_tokens
        saved = 1.0 - (together.prompt_tokens - together.hit_tokens) / computed if computed else 0.0
        table.add_row(
            str(prefixes),
            f"{plain.hit_ratio:.1%}",
            f"{together.hit_ratio:.1%}",
            f"{0.0 - saved:+.1%}",
            f"{plain.largest_wait} / {together.largest_wait}",
        )
    return table


def _without_affinity(item: Submission) -> Submission:
    header = json.loads(item.header)
    header.pop("affinity", None)
    return Submission(item.job_id, json.dumps(header).encode(), item.payload)


def _commit(queue: str, job: PulledJob) -> Any:
    result = Result(id=job.job_id, outputs=(Output(index=0, finish_reason="length"),), model=MODEL)
    return transitions.commit(queue, job.job_id, job.token, "succeeded", result.model_dump_json())


def _text(rng: random.Random, length: int) -> str:
    return "".join(rng.choices("abcdefghijklmnopqrstuvwxyz ", k=length))


if __name__ == "__main__":
    sys.exit(main())
