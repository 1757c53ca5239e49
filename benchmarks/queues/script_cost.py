"""The server's time per pull and commit, with this tree's scripts and with those of another, by turns.

    python -m benchmarks.queues.script_cost --other PATH [--rounds 60] [--tenants 8] [--quota]

Times are the server's own (`INFO commandstats`). Each round submits, pulls and commits the same jobs with either tree's
scripts, on queues of their own on one server; the lower quartiles of the rounds are compared. `--quota`: this tree's
queue has quotas that nobody reaches.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.queues.server import kinds, start_server
from pagemill.producer.wire.calls import submissions, transitions
from pagemill.producer.wire.calls.metering import quotas
from pagemill.producer.wire.calls.metering.quotas import EVERYBODY, Quota
from pagemill.producer.wire.calls.metering.usage import Used
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Progress
from pagemill.producer.wire.server.scripts import Call, expanded
from tests.producer.driving import Queue, open_queue, result_json

JOBS = 64
PULLED = 8
PROGRESS = Progress(
    phase="decode", prompt_tokens_done=100, prompt_tokens=100, generated_tokens=50, max_tokens=64
)
AMPLE = Quota(10**9, 10**9, 10**9, 10**9)


class Tree:
    """Runs calls with the scripts of one checkout, and times them."""

    def __init__(self, root: Path, queue: Queue, name: str) -> None:
        self._queue = queue
        self._prefix = keys.prefix(name)
        folder = root / "producer" / "wire" / "lua"
        self._digests = {
            script: queue.client.script_load(expanded(folder, script))
            for script in ("submit", "pull", "commit")
        }

    def run(self, call: Call[Any]) -> Any:
        reply = self._queue.client.evalsha(self._digests[call.script], 1, self._prefix, *call.args)
        return call.parse(reply)

    def round(self, number: int, tenants: int) -> dict[str, float]:
        """Microseconds per pull and per commit."""
        for tenant in range(tenants):
            items = self._items(number, tenant, JOBS // tenants)
            self.run(submissions.submit("bench", items))
        held = []
        before = self._spent()
        pulls = 0
        while jobs := self.run(transitions.pull("bench", "w1", ["m"], PULLED, 1 << 40)).jobs:
            held += jobs
            pulls += 1
        between = self._spent()
        for job in held:
            body = result_json(job.job_id, "x" * 200)
            call = transitions.commit(
                "bench",
                job.job_id,
                job.token,
                "succeeded",
                body,
                progress=PROGRESS,
                used=Used(100, 10, 50, 0.1),
            )
            assert self.run(call) == "committed"
        after = self._spent()
        return {"pull": (between - before) / (pulls + 1), "commit": (after - between) / len(held)}

    def _items(self, number: int, tenant: int, count: int) -> list[submissions.Submission]:
        job = Job.parse({"prompt": "hello " * 50, "model": "m", "tenant": f"t{tenant}"})
        return [submissions.prepare(job, f"j{number}.{tenant}.{place}") for place in range(count)]

    def _spent(self) -> float:
        return float(self._queue.client.info("commandstats")["cmdstat_evalsha"]["usec"])


def measure(kind: str, url: str, arguments: argparse.Namespace) -> None:
    queue = open_queue(url, "ours")
    queue.client.eval("return 1", 0)
    queue.client.evalsha(queue.client.script_load("return 1"), 0)
    trees = {
        "this": Tree(Path(keys.__file__).parents[3], queue, "ours"),
        "other": Tree(arguments.other, queue, "theirs"),
    }
    if arguments.quota:
        queue.run(quotas.set_quotas("ours", {EVERYBODY: AMPLE}))
    found: dict[tuple[str, str], list[float]] = {}
    for number in range(arguments.rounds):
        for name, tree in trees.items() if number % 2 else reversed(trees.items()):
            for what, time in tree.round(number, arguments.tenants).items():
                found.setdefault((what, name), []).append(time)
    for what in ("pull", "commit"):
        ours, theirs = (statistics.quantiles(found[what, name], n=4)[0] for name in ("this", "other"))
        print(f"{kind} {what}: {ours:.2f} us, {theirs:.2f} us in the other: {ours / theirs - 1:+.1%}")
    queue.transport.close()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--other", type=Path, required=True, help="a checkout")
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--tenants", type=int, default=8)
    parser.add_argument("--quota", action="store_true")
    parser.add_argument("--servers", nargs="+", choices=kinds(), default=kinds())
    arguments = parser.parse_args()
    for kind in arguments.servers:
        with tempfile.TemporaryDirectory() as directory, start_server(kind, Path(directory)) as url:
            measure(kind, url, arguments)


if __name__ == "__main__":
    main()
