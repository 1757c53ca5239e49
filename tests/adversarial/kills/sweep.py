"""Kill workers by the hundred under load, over every kind of server, and count what was lost, doubled or left.

    .venv/bin/python -m tests.adversarial.kills.sweep --kills 1000

prints the results that docs/reliability.md sums up. Three workers at a time, each a separate process, killed by
SIGKILL at random moments and replaced at once; jobs keep coming until the last kill. In every second run two of the
jobs kill their workers by themselves. Exit status 1 if any guarantee was broken.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import uuid
from dataclasses import dataclass
from pathlib import Path

from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import END_STATES
from tests.chaos import invariants
from tests.chaos.fork_server import ForkedWorker, ForkServer
from tests.topologies import KINDS, any_server
from tests.worker.harness import QueueClient, process_settings

WORKERS = 3
PAUSE_S = (0.05, 0.6)
"""The delay between two kills is random in this range."""
BACKLOG = 60
POISON = "\x07"
"""A prompt that kills the worker which starts it (tests/chaos/fork_server.py)."""


@dataclass(frozen=True)
class Toll:
    """The outcome of a run."""

    kind: str
    has_poison: bool
    kills: int
    """Killed by this program; poison jobs kill more."""
    jobs: int
    lost: int
    """Unfinished, or with another job's result."""
    doubled: int
    """Outcomes that were counted, or reported, more than once."""
    leaked: int
    """Keys of live workers left over when none is alive."""
    buried: int
    """Dead, although the jobs were valid."""
    seconds: float
    fault: str = ""
    """Violations of the invariants of tests/chaos."""

    @property
    def is_clean(self) -> bool:
        return not (self.lost or self.doubled or self.leaked or self.buried or self.fault)

    def row(self) -> str:
        cells = (
            self.kind + (", with jobs that kill" if self.has_poison else ""), self.kills, f"{self.jobs:,}", self.lost,
            self.doubled, self.leaked, self.buried, round(self.seconds),
        )  # fmt: skip
        return "| " + " | ".join(map(str, cells)) + " |"


HEADER = (
    "| server | kills | jobs | lost | doubled | leaked keys | buried by chance | s |\n" + "| --- " * 8 + "|"
)


class Load:
    """A continuous stream of jobs, of half a second to one and a half each."""

    def __init__(self, client: QueueClient, rng: random.Random) -> None:
        self._client = client
        self._rng = rng
        self.ids: list[str] = []
        self.texts: list[str] = []

    def top_up(self) -> None:
        if self._client.stats().counts.get("queued", 0) < BACKLOG:
            self.add([f"{len(self.ids) + i:05d} " * self._rng.randint(16, 50) for i in range(BACKLOG)])

    def add(self, texts: list[str]) -> None:
        jobs = (
            {"prompt": text, "max_tokens": len(text), "stream": self._rng.random() < 0.3} for text in texts
        )
        self.ids += self._client.submit(*jobs, batch_id="all")
        self.texts += texts


def sweep(url: str, kind: str, kills: int, seed: int, directory: Path, *, has_poison: bool) -> Toll:
    """Kill this many workers of one queue."""
    rng, began = random.Random(seed), time.monotonic()
    queue = f"q-{uuid.uuid4().hex[:12]}"
    client = QueueClient(url, queue)
    load = Load(client, rng)
    directory.mkdir()
    with ForkServer(directory, process_settings(url, queue)) as fork_server:
        workers = [fork_server.spawn() for _ in range(WORKERS)]
        for number in range(kills):
            load.top_up()
            if has_poison and number in (kills // 4, kills // 2):
                load.add([POISON])
            time.sleep(rng.uniform(*PAUSE_S))
            workers[rng.randrange(WORKERS)].kill()
            _replace_the_dead(fork_server, workers)
        _let_end(client, load, fork_server, workers)
        toll = _toll(client, load, kind, kills, time.monotonic() - began, has_poison=has_poison)
    client.redis.close()
    return toll


def _replace_the_dead(fork_server: ForkServer, workers: list[ForkedWorker]) -> None:
    for index, worker in enumerate(workers):
        if not worker.is_alive:
            workers[index] = fork_server.spawn()


def _let_end(client: QueueClient, load: Load, fork_server: ForkServer, workers: list[ForkedWorker]) -> None:
    give_up = time.monotonic() + 300
    while client.counts("all").ended < len(load.ids) and time.monotonic() < give_up:
        _replace_the_dead(fork_server, workers)
        time.sleep(0.1)


def _toll(
    client: QueueClient, load: Load, kind: str, kills: int, seconds: float, *, has_poison: bool
) -> Toll:
    outcomes = [client.outcome(job_id) for job_id in load.ids]
    told = client.redis.llen(f"{keys.prefix(client.queue)}bfeed:all")
    counted = sum(client.stats().counts.get(state, 0) for state in END_STATES)
    ended = sum(outcome.state in END_STATES for outcome in outcomes)
    pairs = list(zip(outcomes, load.texts, strict=True))
    fault = ""
    try:
        invariants.check(client, load.ids)
    except AssertionError as error:
        fault = str(error)
    return Toll(
        kind, has_poison, kills, len(load.ids), lost=sum(_is_lost(outcome, text) for outcome, text in pairs),
        doubled=max(0, told - ended) + max(0, counted - ended), leaked=len(invariants.leftovers(client)),
        buried=sum(outcome.state == "dead" and text != POISON for outcome, text in pairs),
        seconds=seconds, fault=fault,
    )  # fmt: skip


def _is_lost(outcome: Outcome, text: str) -> bool:
    if text == POISON:
        return outcome.error is None or outcome.error.code != "crash_suspect"
    if outcome.state == "dead":
        return False
    return outcome.result is None or (outcome.result.text, outcome.result.token_ids) != (
        text,
        tuple(text.encode()),
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=1000, help="over all runs")
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args(arguments)
    runs = [(kind, has_poison) for kind in KINDS for has_poison in (False, True)]
    tolls = []
    sys.stdout.write(HEADER + "\n")
    for number, (kind, has_poison) in enumerate(runs):
        kills = asked.kills // len(runs) + (number < asked.kills % len(runs))
        with tempfile.TemporaryDirectory() as directory, any_server(kind, Path(directory) / "server") as url:
            seed = asked.seed * 1000 + number
            tolls.append(sweep(url, kind, kills, seed, Path(directory) / "workers", has_poison=has_poison))
        sys.stdout.write(tolls[-1].row() + (f" {tolls[-1].fault}" if tolls[-1].fault else "") + "\n")
        sys.stdout.flush()
    sys.stdout.write(f"seed {asked.seed}, {sum(toll.seconds for toll in tolls):.0f} s\n")
    return 0 if all(toll.is_clean for toll in tolls) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
