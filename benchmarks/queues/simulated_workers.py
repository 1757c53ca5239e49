"""Workers without engines: the real transitions at the pace of an engine that is not there.

A process drives hundreds of them from one loop, with a connection each. What a worker sends, and when, is what
worker/ sends: a pull whenever rows are free, the announcement before a job's first step, a checkpoint a second, a
renewal and a heartbeat every two, a commit per job; calls of one kind that are due together share a round trip.
"""

from __future__ import annotations

import heapq
import math
import random
import selectors
import socket
import time
import urllib.parse
from array import array
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from benchmarks.queues.resp import Replies, pack
from pagemill import Producer
from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.schema.outputs import Delta, Output, Progress, Result, Usage
from pagemill.producer.wire.server import scripts
from pagemill.producer.wire.server.scripts import Call

MODEL = "simulated"
BATCH = "simulation"
IDLE_S = 0.5
"""Between two pulls of a worker that finds nothing; a real one waits for a doorbell as long."""
_ID = "0" * 24


@dataclass(frozen=True, slots=True)
class Load:
    """The properties of the simulated engines."""

    queue: str = "simulation"
    rows: int = 16
    """Jobs that a worker runs at once."""
    service_s: float = 2.0
    """A job's time in the engine, on average; each is within half of that."""
    tokens: int = 64
    step_s: float = 0.025
    """Jobs end with a step, and so several together."""
    prompt_bytes: int = 200
    tenants: int = 10
    lease_ms: int = transitions.LEASE_MS
    renew_s: float = 2.0
    checkpoint_s: float = 1.0


@dataclass(slots=True)
class Tally:
    """The outcome of one stretch of a run."""

    seconds: float = 0.0
    cpu_s: float = 0.0
    """Of this process."""
    calls: Counter[str] = field(default_factory=Counter)
    latencies_s: dict[str, array[float]] = field(default_factory=dict)
    """Of round trips, by the script that they carried."""
    replies: Counter[str] = field(default_factory=Counter)
    """To commits, and `lost` for leases that had lapsed."""


@dataclass(slots=True)
class _Job:
    token: int
    started: float
    ends: float
    checkpoint_at: float
    written: int = 0


@dataclass(slots=True)
class _Flight:
    script: str
    calls: list[Call[Any]]
    ids: list[str]
    sent: float
    replies: Replies


class SimulatedWorker:
    """One connection, and the jobs that its engine would be running."""

    def __init__(self, url: str, load: Load, name: str) -> None:
        place = urllib.parse.urlsplit(url)
        self.socket = socket.create_connection((place.hostname or "127.0.0.1", place.port or 6379))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.name = name
        self.queued = 1
        """Jobs that waited when it last pulled."""
        self._load = load
        self._random = random.Random(name)
        self._jobs: dict[str, _Job] = {}
        self._flight: _Flight | None = None
        now = time.monotonic()
        # Workers do not renew in step.
        self._renew_at = now + self._random.uniform(0, load.renew_s)
        self._beat_at = now
        self._pull_at = now
        self._result = _result(load)

    @property
    def holds(self) -> bool:
        return bool(self._jobs)

    def next_due(self) -> float:
        """When there is something to send."""
        due = min(self._renew_at, self._beat_at)
        if len(self._jobs) < self._load.rows:
            due = min(due, self._pull_at)
        for job in self._jobs.values():
            due = min(due, job.ends, job.checkpoint_at)
        return due

    def send_what_is_due(self, now: float) -> bool:
        """Send one pipeline, of one script's calls. False: there is nothing yet."""
        if self._renew_at <= now:
            self._renew_at = now + self._load.renew_s
            if self._jobs:
                held = [(job_id, job.token) for job_id, job in self._jobs.items()]
                call = transitions.renew(self._load.queue, self.name, held, self._load.lease_ms)
                return self._send([call], list(self._jobs), now)
        if self._beat_at <= now:
            self._beat_at = now + self._load.renew_s
            info = registry.WorkerInfo(id=self.name, models=(MODEL,), running=len(self._jobs))
            return self._send([registry.heartbeat(self._load.queue, info)], [], now)
        if ended := [job_id for job_id, job in self._jobs.items() if job.ends <= now]:
            return self._send([self._commit(job_id) for job_id in ended], ended, now)
        if due := [job_id for job_id, job in self._jobs.items() if job.checkpoint_at <= now]:
            return self._send([self._checkpoint(job_id, now) for job_id in due], due, now)
        free = self._load.rows - len(self._jobs)
        if free and self._pull_at <= now:
            pull = transitions.pull(
                self._load.queue, self.name, [MODEL], free, 1 << 40, self._load.lease_ms,
                holding=len(self._jobs),
            )  # fmt: skip
            return self._send([pull], [], now)
        return False

    def receive(self, tally: Tally) -> bool:
        """Read what has arrived. True: the flight has landed, its replies are dealt with."""
        flight = self._flight
        assert flight is not None
        data = self.socket.recv(1 << 16)
        if not data:
            raise ConnectionError("the server hung up")
        if not flight.replies.feed(data):
            return False
        self._flight = None
        now = time.monotonic()
        tally.calls[flight.script] += len(flight.calls)
        tally.latencies_s.setdefault(flight.script, array("d")).append(now - flight.sent)
        for call, reply in zip(flight.calls, flight.replies.values, strict=True):
            self._deal_with(flight, call.parse(reply), tally, now)
        return True

    def leave(self) -> None:
        self.socket.close()

    def _send(self, calls: list[Call[Any]], ids: list[str], now: float) -> bool:
        self._flight = _Flight(calls[0].script, calls, ids, now, Replies(len(calls)))
        self.socket.sendall(b"".join(pack(evalsha(call)) for call in calls))
        return True

    def _deal_with(self, flight: _Flight, reply: Any, tally: Tally, now: float) -> None:
        match flight.script:
            case "pull":
                self.queued = reply.queued
                for pulled in reply.jobs:
                    self._jobs[pulled.job_id] = self._begin(pulled.token, now)
                if not reply.jobs:
                    self._pull_at = now + IDLE_S
            case "commit":
                tally.replies[reply] += 1
                self._jobs.pop(flight.ids.pop(0), None)
            case "renew":
                tally.replies["lost"] += len(reply.lost)
                for job_id in reply.lost:
                    self._jobs.pop(job_id, None)

    def _begin(self, token: int, now: float) -> _Job:
        """A job that says at once that it enters a step."""
        took = self._load.service_s * self._random.uniform(0.5, 1.5)
        step = self._load.step_s
        return _Job(token, now, math.ceil((now + took) / step) * step, checkpoint_at=now)

    def _checkpoint(self, job_id: str, now: float) -> Call[Any]:
        load, job = self._load, self._jobs[job_id]
        share = min(1.0, (now - job.started) / max(job.ends - job.started, 1e-9))
        have = int(share * load.tokens) if job.checkpoint_at > job.started else 0
        tokens = tuple(range(1000 + job.written, 1000 + have))
        deltas = [Delta(index=0, offset=job.written, token_ids=tokens)] if tokens else []
        progress = Progress(
            phase="decode" if have else "prefill", prompt_tokens_done=50, prompt_tokens=50,
            generated_tokens=have, max_tokens=load.tokens,
        )  # fmt: skip
        job.written = have
        job.checkpoint_at = now + load.checkpoint_s
        return transitions.checkpoint(
            load.queue, job_id, job.token, progress, deltas, fingerprint="simulated"
        )

    def _commit(self, job_id: str) -> Call[Any]:
        result = self._result.replace(_ID, job_id)
        return transitions.commit(self._load.queue, job_id, self._jobs[job_id].token, "succeeded", result)


class Fleet:
    """Some of the workers, driven by this process."""

    def __init__(self, url: str, load: Load, name: str) -> None:
        self._url, self._load, self._name = url, load, name
        self._workers: list[SimulatedWorker] = []
        self._selector = selectors.DefaultSelector()

    def run(self, workers: int, seconds: float | None) -> Tally:
        """Let workers run for this long, or (None) until no job waits or runs. Their jobs go on in the next run."""
        while len(self._workers) < workers:
            worker = SimulatedWorker(self._url, self._load, f"{self._name}-{len(self._workers)}")
            self._workers.append(worker)
            self._selector.register(worker.socket, selectors.EVENT_READ, len(self._workers) - 1)
        tally = Tally()
        began, cpu = time.monotonic(), time.process_time()
        self._loop(tally, math.inf if seconds is None else began + seconds)
        tally.seconds, tally.cpu_s = time.monotonic() - began, time.process_time() - cpu
        return tally

    def _loop(self, tally: Tally, end: float) -> None:
        waiting = [(0.0, index) for index in range(len(self._workers))]
        flying = 0
        while True:
            now = time.monotonic()
            is_over = now >= end or (end == math.inf and self._is_drained())
            if is_over and not flying:
                return
            while waiting and not is_over and waiting[0][0] <= now:
                _, index = heapq.heappop(waiting)
                if self._workers[index].send_what_is_due(now):
                    flying += 1
                else:
                    heapq.heappush(waiting, (self._workers[index].next_due(), index))
            pause = 0.1 if is_over or not waiting else min(0.1, max(0.0, waiting[0][0] - time.monotonic()))
            for key, _ in self._selector.select(pause):
                if self._workers[key.data].receive(tally):
                    flying -= 1
                    heapq.heappush(waiting, (0.0, key.data))

    def _is_drained(self) -> bool:
        return all(worker.queued == 0 and not worker.holds for worker in self._workers)

    def close(self) -> None:
        for worker in self._workers:
            worker.leave()
        self._selector.close()


def submit_share(url: str, load: Load, first: int, count: int) -> None:
    """This process's part of the jobs, as items of the one batch."""

    def rows() -> Iterator[dict[str, Any]]:
        for i in range(first, first + count):
            text = f"Row {i}: "
            yield {
                "model": MODEL,
                "prompt": text + "x" * max(0, load.prompt_bytes - len(text)),
                "max_tokens": load.tokens,
                "temperature": 0.0,
                "tenant": f"tenant-{i % load.tenants}",
                "key": str(i),
            }

    with Producer(url, queue=load.queue) as producer:
        producer.submit_many(rows(), batch_id=BATCH)


def serve(url: str, load: Load, name: str, orders: Connection) -> None:
    """A client process: does what it is told until the other end hangs up.

    Orders are ("submit", first, count), ("work", workers, seconds or None); the answer is a Tally or None.
    """
    fleet = Fleet(url, load, name)
    try:
        while True:
            kind, *arguments = orders.recv()
            if kind == "submit":
                submit_share(url, load, *arguments)
                orders.send(None)
            else:
                orders.send(fleet.run(*arguments))
    except EOFError:
        pass
    finally:
        fleet.close()


def evalsha(call: Call[Any]) -> tuple[str | bytes | int | float, ...]:
    return ("EVALSHA", scripts.sha1(call.script), len(call.keys), *call.keys, *call.args)


def _result(load: Load) -> str:
    tokens = tuple(range(1000, 1000 + load.tokens))
    output = Output(index=0, text="word " * load.tokens, token_ids=tokens, finish_reason="length")
    usage = Usage(prompt_tokens=50, completion_tokens=load.tokens)
    return Result(id=_ID, outputs=(output,), usage=usage, model=MODEL, seed=1).model_dump_json()
