"""Producers and workers of a storm: random calls from a seed, every reply checked against the ledger."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pagemill.producer.wire.calls import rollouts, submissions, transitions
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.rollouts import RolloutStatus
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.server.scripts import Call
from tests.adversarial.queue.ledger import KnownJob, Ledger
from tests.adversarial.queue.meter import Meter
from tests.producer.driving import DECODE, Queue, delta, error_json, result_json
from tests.server_clock import ClockedServer

T = TypeVar("T")

MODELS = ("m", "org/model:7b")
TENANTS = ("a", "b", "c@x")
WORKERS = tuple(f"w{i}" for i in range(6))
RELAYS = ("", "celery", "other")
MAX_BYTES = 8 << 20
"""The maximum size of a result or a checkpoint that a worker permits."""
START_S = 1_800_000_000
CANARIES = WORKERS[4:]
"""Workers of revision r2; the others are of r1."""
BACKLOG = 1500
ENDED_BY_REQUEST = {"cancelled": "cancelled", "expired": "expired"}


@dataclass(frozen=True, slots=True)
class Pace:
    """Lengths of leases, pauses and deadlines (ms): time is skipped, or must pass."""

    leases: tuple[int, ...]
    pause: tuple[int, int]


JUMPED = Pace((2_000, 6_000, 60_000), (1_000, 3_600_000))
WAITED = Pace((20, 200, 5_000), (5, 400))


USED = JobUsage(7, 2, 5, 0.0)
"""The reported usage of each execution that finishes its job."""


def revision_of(worker: str) -> str:
    return "r2" if worker in CANARIES else "r1"


def names_of(models: tuple[str, ...], revision: str) -> tuple[str, ...]:
    """The names with which a worker of the revision pulls."""
    return (*models, *(f"{model}~{revision}" for model in models))


def write_header(header: dict[str, Any]) -> bytes:
    return json.dumps(header).encode()


class Parties:
    """The submitters of one queue, and the workers that run its jobs."""

    def __init__(self, queue: Queue, seed: int, clock: ClockedServer | None, *, kills: bool = False) -> None:
        self.queue = queue
        self.rng = random.Random(seed)
        self.clock = clock
        self.kills = kills and clock is not None
        self.pace = JUMPED if clock else WAITED
        self.ledger = Ledger()
        self.meter = Meter(queue, self.rng)
        self.clock_s = START_S
        if clock is not None:
            clock.stop_at(self.clock_s)
        self.week = 0
        self.held: list[tuple[str, int]] = []
        """Job and token of each execution whose worker continues, rightly or not."""
        self.feeds: dict[str, dict[int, str]] = {}
        """The outcomes that were read, per batch, by their positions."""
        self.notices: dict[tuple[str, str], int] = {}
        """The latest delivery attempt, per job and outbox."""
        self.kills_done = 0
        self.asked_before_ms = 0.0
        """The server's time just before the last call."""
        self.is_unsure = False
        """The last call may have been executed twice: its first reply was lost."""
        self.read_time()

    # Connection to the server.

    def read_time(self) -> None:
        seconds, micros = self.queue.client.time()
        self.ledger.set_time(seconds * 1000 + micros // 1000)

    def send(self, call: Call[T]) -> T:
        """Return the reply; sometimes to the second of two equal calls, when the first one's reply was lost."""
        self.asked_before_ms = self.ledger.now_ms
        self.is_unsure = False
        if self.kills and self.rng.random() < 0.002:
            self._kill_after(call)
        reply = self.meter.run(call)
        self.read_time()
        return reply

    def send_twice(self, call: Call[T]) -> tuple[T, T | None]:
        """The reply, and sometimes that to a repetition of the call."""
        first = self.send(call)
        return first, self.meter.run(call) if self.rng.random() < 0.2 else None

    def _kill_after(self, call: Call[Any]) -> None:
        """The server crashes during or after a call; all data of earlier replies exists when it is back."""
        assert self.clock is not None
        self.meter.killed.append(f"{call.script} after {self.meter.calls}")
        pending = self.queue.transport.begin(call)
        self.clock.server.kill()
        self.clock.start()
        pending.abandon()
        self.queue.client.connection_pool.disconnect()
        self.kills_done += 1
        self.is_unsure = True

    def observe(self, ids: list[str]) -> None:
        """Look up these jobs. Primary jobs come before those that share their outcomes."""
        with self.queue.client.pipeline(transaction=False) as pipeline:
            for job_id in ids:
                pipeline.hmget(f"{self.queue.prefix}job:{job_id}", "state", "finished_at", "leader")
            rows = pipeline.execute()
        self.read_time()
        found = zip(ids, rows, strict=True)
        for job_id, (state, at, leader) in sorted(found, key=lambda row: row[1][2] is not None):
            self.ledger.seen(
                self.ledger.jobs[job_id],
                state.decode() if state else None,
                float(at or 0),
                leader.decode() if leader else None,
            )

    # Their actions.

    def size(self) -> int:
        """Bytes: usually few, sometimes up to 8 MiB."""
        if self.rng.random() < 0.99:
            return int(2 ** self.rng.uniform(0, 10))
        return int(2 ** self.rng.uniform(10, 23))

    def pause_ms(self) -> int:
        return self.rng.randint(*self.pace.pause)

    def pick(self, ids: Iterable[str] | None = None, most: int = 1) -> list[str]:
        pool = sorted(self.ledger.active) if ids is None else list(ids)
        return self.rng.sample(pool, min(len(pool), most))

    def batch(self) -> str:
        """One of a few that grow; after a week, when the old ones are purged, others."""
        return f"batch-{self.week}-{self.rng.randint(0, 3)}"

    def submit(self) -> None:
        batch = self.rng.choice([None, self.batch()])
        self._submit([self.make_job(batch) for _ in range(self.rng.choice([1, 1, 3, 10, 60]))], batch)

    def submit_equal(self) -> None:
        """More of them than may follow one."""
        batch, twin = self.rng.choice([None, self.batch()]), f"{self.rng.choice(TENANTS)}:{self.rng.random()}"
        for _ in range(self.rng.randint(1, 3)):
            self._submit([self.make_job(batch, twin) for _ in range(self.rng.choice([5, 60, 200]))], batch)

    def make_job(self, batch: str | None, twin: str | None = None) -> tuple[KnownJob, dict[str, Any]]:
        rng = self.rng
        tenant = twin.partition(":")[0] if twin else rng.choice(TENANTS)
        job = KnownJob(f"j{rng.getrandbits(64):x}", tenant, rng.randbytes(min(self.size(), 1_049_600)), batch)
        job.model = rng.choice(MODELS[:1] if twin else MODELS)
        lane = f"1:{rng.choice('0112')}:{tenant}:{job.model}"
        if not twin and rng.random() < 0.05:
            job.revision = rng.choice(["r1", "r2"])
            lane = f"{lane}~{job.revision}"
        header: dict[str, Any] = {"id": job.id, "lane": lane, "cost": rng.choice([1, 50, 10_000, 10**12])}
        job.max_attempts = rng.choice([1, 3, 3, 3])
        if job.max_attempts != 3:
            header["max_attempts"] = job.max_attempts
        if twin is None and rng.random() < 0.2:
            twin = f"{tenant}:{rng.randint(0, 20)}"
        if twin:
            job.twin = header["twin"] = twin
        if rng.random() < 0.1:
            job.idem, job.digest = f"{tenant}:key-{rng.randint(0, 30)}", str(rng.randint(0, 1))
            header |= {"idem": job.idem, "digest": job.digest}
        if rng.random() < 0.1:
            header["delay"] = self.pause_ms()
        if rng.random() < 0.1:
            header["ttl"] = self.pause_ms()
        if rng.random() < 0.2:
            job.affinity = header["affinity"] = rng.choice(["aaa", "bbb", "ccc"])
        if rng.random() < 0.1:
            header["webhook"] = "https://example.com/hook"
        if rng.random() < 0.1:
            header["relay"] = rng.choice(RELAYS[1:])
        job.boxes = frozenset(["webhook" in header and "", header.get("relay", False)]) - {False}
        if rng.random() < 0.1 and job.revision is None:
            header |= self.link(job, lane)
        header |= {"n": 3} if rng.random() < 0.3 else {}
        header |= {"stream": 1} if rng.random() < 0.2 else {}
        header |= {"metadata": json.dumps({"m": "x" * rng.randint(0, 16_000)})} if rng.random() < 0.05 else {}
        if batch and rng.random() < 0.02:
            header["invalid"] = error_json()
        return job, header

    def link(self, job: KnownJob, lane: str) -> dict[str, Any]:
        """Make a job wait for others, which may have finished, no longer exist, or belong to another tenant."""
        recent = list(self.ledger.jobs)[-300:]
        is_own = self.rng.random() < 0.97
        pool = [other for other in recent if not is_own or self.ledger.jobs[other].tenant == job.tenant]
        job.parents = tuple(self.pick(pool, self.rng.randint(1, 3)))
        if not job.parents:
            return {}
        job.is_lenient, job.reads = self.rng.random() < 0.4, self.rng.random() < 0.5
        header: dict[str, Any] = {"after": " ".join(job.parents), "lane": f"1+after{lane[1:]}"}
        header |= {"otherwise": "run"} if job.is_lenient else {}
        return header | ({"reads": 1} if job.reads else {})

    def _submit(self, made: list[tuple[KnownJob, dict[str, Any]]], batch: str | None) -> None:
        items = [
            Submission(job.id, write_header(header), job.payload, bool(job.parents)) for job, header in made
        ]
        replies, again = self.send_twice(submissions.submit(self.queue.name, items, batch_id=batch))
        for i, (job, header) in enumerate(made):
            word, other = replies[i].status, replies[i].job_id
            if (word == "exists" and self.is_unsure) or (
                word == "same" and self.is_unsure and other == job.id
            ):
                word = "created"
            if word == "created":
                self.enter(job, header)
            elif word in ("same", "conflict"):
                self.observe([other])
                self.ledger.refused(job.idem or "", job.digest, word, other)
            elif word == "unknown":
                assert other in job.parents
                parent = self.ledger.jobs[other]
                may_be_gone = self.ledger.latest_ms >= parent.must_live_until_ms()
                assert may_be_gone or parent.tenant != job.tenant, f"{job.id} may not wait for {other}"
            else:
                assert word in ("full", "too_large"), f"{job.id}: {word}"
                assert word == "full" or len(job.payload) > 1000
            if again is not None:
                if word in ("full", "same", "conflict") and any(job.parents for job, _ in made):
                    # The first call immediately ended jobs whose parents had failed, which freed space and keys.
                    if again[i].status == "created":
                        self.enter(job, header)
                        continue
                    if word != "full" and again[i].status in ("same", "conflict"):
                        continue
                expected = "exists" if word == "created" else word
                if word == "unknown" and again[i].status in ("full", "same", "conflict"):
                    continue  # later ones of the first call used the space, or the key
                assert again[i].status == expected, f"{job.id}: {word}, then {again[i].status}"
        if self.rng.random() < 0.1 and (known := self.pick(self.ledger.jobs, 3)):
            self.submit_known([job_id for job_id in known if not self.ledger.jobs[job_id].is_freed])

    def enter(self, job: KnownJob, header: dict[str, Any]) -> None:
        if job.idem and job.idem in self.ledger.holders:
            self.observe([self.ledger.holders[job.idem]])
        if "ttl" in header:
            job.deadline_ms = self.asked_before_ms + header["ttl"]
        self.ledger.created(job)
        if "invalid" in header:
            job.boxes, job.is_invalid = frozenset(), True
            self.ledger.ended(job, "failed", self.asked_before_ms)

    def submit_known(self, ids: list[str], batch: str | None = None) -> None:
        """With a known id nothing is stored, regardless of the other fields."""
        self.observe(ids)
        known = [i for i in ids if batch or self.ledger.latest_ms < self.ledger.jobs[i].must_live_until_ms()]
        items = [
            Submission(i, write_header({"id": i, "lane": "1:1:a:m", "cost": 1}), b"other") for i in known
        ]
        if items:
            replies = self.send(submissions.submit(self.queue.name, items, batch_id=batch))
            assert {reply.status for reply in replies} == {"exists"}, f"{known} were forgotten"

    def pull(self) -> None:
        worker, count = self.rng.choice(WORKERS), self.rng.choice([1, 8, 64])
        lease_ms, cost = self.rng.choice(self.pace.leases), self.rng.choice([100, 10**6, 10**15])
        holding = self.rng.choice([0, 0, 5])
        call = transitions.pull(
            self.queue.name,
            worker,
            self.served(worker),
            count,
            cost,
            lease_ms,
            holding=holding,
            longest=100_000,
        )
        replies = []
        if self.rng.random() < 0.03:  # this reply is lost
            replies.append((self.send(call), self.asked_before_ms + lease_ms))
        found = self.queue.run(rollouts.statuses(self.queue.name))
        reply = self.send(call)
        replies.append((reply, self.asked_before_ms + lease_ms))
        if not self.is_unsure:
            self.check_pull(worker, reply.jobs, found)
        for pulled, until_ms in [(job, until_ms) for answer, until_ms in replies for job in answer.jobs]:
            self.observe(list(self.ledger.jobs[pulled.job_id].parents))
            self.ledger.pulled(pulled.job_id, pulled.token, pulled.payload, pulled.entries, until_ms)
        assert len(reply.jobs) <= count
        assert not (reply.paused and reply.jobs)
        assert not any(job.alone for job in reply.jobs) or len(reply.jobs) == 1
        self.held += [(job.job_id, job.token) for job in reply.jobs]

    def served(self, worker: str) -> tuple[str, ...]:
        raise NotImplementedError

    def check_pull(self, worker: str, jobs: Sequence[PulledJob], rollouts_then: list[RolloutStatus]) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        """Finish an execution, sometimes long after another one owned the job."""
        for _ in range(min(len(self.held), self.rng.choice([1, 1, 8, 30]))):
            index = self.rng.randrange(len(self.held))
            job_id, token = self.held[index]
            match self.rng.choices(("commit", "retry", "release", "wait"), (60, 10, 8, 22))[0]:
                case "commit":
                    self.commit(self.ledger.jobs[job_id], token)
                case "retry":
                    self.checkpoint_of(job_id, token)
                    self.retry(self.ledger.jobs[job_id], token)
                case "release":
                    self.release(self.ledger.jobs[job_id], token)
                case "wait":
                    continue
            if self.rng.random() < 0.95:
                self.held[index] = self.held[-1]
                self.held.pop()

    def commit(self, job: KnownJob, token: int) -> None:
        state: Any = self.rng.choices(("succeeded", "failed", "cancelled", "expired"), (90, 6, 2, 2))[0]
        text = f"{job.id}/{token}/"
        body = result_json(job.id, text + "x" * min(self.size(), MAX_BYTES - 4096))
        error = error_json(message=text)
        progress = self.rng.choice([None, DECODE])
        call = transitions.commit(self.queue.name, job.id, token, state, body, error, progress, used=USED)
        word = self._write(job, token, call, ENDED_BY_REQUEST | {state: "committed"})
        if word == "committed":
            self.ledger.committed(job, token, state, text)
        if word in ("committed", *ENDED_BY_REQUEST):
            job.is_metered = True

    def retry(self, job: KnownJob, token: int) -> None:
        error = ErrorInfo(code="engine_error", message="x" * min(self.size(), MAX_BYTES), retryable=True)
        restart = self.rng.random() < 0.5
        call = transitions.retry(
            self.queue.name, job.id, token, error, self.pause_ms() / 1000, restart=restart, used=USED
        )
        word = self._write(job, token, call, ENDED_BY_REQUEST | {"delayed": "retrying", "dead": "dead"})
        if word in ("dead", *ENDED_BY_REQUEST):
            job.is_metered = True
        if word in ("retrying", "dead"):
            self.ledger.failed_attempt(job, token, is_dead=word == "dead")
            if restart and word == "retrying":
                job.entries.clear()
                job.lengths.clear()

    def release(self, job: KnownJob, token: int) -> None:
        call = transitions.release(self.queue.name, job.id, token)
        if self._write(job, token, call, ENDED_BY_REQUEST | {"queued": "released"}) == "released":
            self.ledger.given_back(job, token)

    def _write(self, job: KnownJob, token: int, call: Call[Any], meaning: dict[str, str]) -> str:
        """Send a worker's call for a job it may hold. Returns the reply, as if it had arrived the first time:
        `meaning` has the reply that follows from the state that the call left."""
        may = self.ledger.may_write(job, token)
        word, again = self.send_twice(call)
        if word == "already_done" and self.is_unsure and may:
            word = meaning[self.queue.client.hget(f"{self.queue.prefix}job:{job.id}", "state").decode()]
        assert again in (None, "fenced" if word == "fenced" else "already_done")
        if self.ledger.is_surely_held(job) and token == job.token:
            assert word not in ("fenced", "already_done"), f"{job.id}: {call.script} by its holder was {word}"
        if word in ("cancelled", "expired"):
            assert may, f"{job.id}: {call.script} ended it, by the stale token {token}"
            assert job.is_cancelled if word == "cancelled" else job.deadline_ms <= self.ledger.latest_ms
            self.ledger.ended(job, word, self.ledger.now_ms)
        return word

    def checkpoint(self) -> None:
        if self.held:
            self.checkpoint_of(*self.rng.choice(self.held))

    def checkpoint_of(self, job_id: str, token: int) -> None:
        job = self.ledger.jobs[job_id]
        restart, is_new = self.rng.random() < 0.1, self.rng.random() < 0.8
        index, width = 0, self.rng.choice([0, 1, 32])
        offset = (0 if restart else job.lengths[index]) + self.rng.choice([0] * 9 + [3])
        room = MAX_BYTES - sum(map(len, job.entries))
        # An entry like the last one would look like the same call; no worker writes text without tokens twice.
        text = f"{self.rng.getrandbits(32)}" + "y" * min(self.size(), max(0, room))
        news = delta(offset, *range(width), index=index, text=text)
        progress = DECODE if is_new else DECODE.model_copy(update={"phase": "waiting"})
        deltas = [news] if is_new else []
        may = self.ledger.may_write(job, token)
        call = transitions.checkpoint(self.queue.name, job_id, token, progress, deltas, restart=restart)
        word, again = self.send_twice(call)
        assert again in (None, word)
        if self.ledger.is_surely_held(job) and token == job.token:
            assert word != "stale", f"{job_id}: a checkpoint by its holder was refused"
        if word in ("ok", "cancelled"):
            assert may, f"{job_id} took a checkpoint by the stale token {token}"
            self._saved(job, deltas, restart, is_new)
        elif word == "bad_offset":
            assert offset != (0 if restart else job.lengths[index])

    def _saved(self, job: KnownJob, deltas: list[Any], restart: bool, is_new: bool) -> None:
        if restart:
            job.entries.clear()
            job.lengths.clear()
        job.has_stepped |= is_new
        for news in deltas:
            job.entries.append(news.model_dump_json(exclude_defaults=True).encode())
            job.lengths[news.index] += len(news.token_ids)
            if news.token_ids:
                job.has_advanced, job.crashes = True, 0

    def renew(self) -> None:
        pairs = list(dict(self.rng.sample(self.held, min(len(self.held), 20))).items())
        lease_ms = self.rng.choice(self.pace.leases)
        reply = self.send(transitions.renew(self.queue.name, "w", pairs, lease_ms))
        for job_id, token in pairs:
            job = self.ledger.jobs[job_id]
            if job_id in reply.lost:
                assert not (self.ledger.is_surely_held(job) and job.token == token), f"{job_id} is not lost"
            else:
                assert self.ledger.may_write(job, token), f"{job_id} was renewed by the stale token {token}"
                job.lease_until_ms = self.asked_before_ms + lease_ms
            if job_id in reply.cancelled:
                assert job.is_cancelled or job.deadline_ms <= self.ledger.latest_ms
