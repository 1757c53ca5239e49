"""The permitted states of a queue: a simple account of the guarantees in docs/protocol.md, next to a real queue.

It does not predict states, since the passage of time is not controlled. It knows the requests and replies of every job,
so it can check the reason for each outcome, detect wrong replies, and compute how long a record must exist.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES

HOUR_MS = 3_600_000
DAY_MS = 24 * HOUR_MS
RECORD_MS = {"dead": 14 * DAY_MS}
"""How long an outcome is kept if not for a day."""
NOTICE_MS = BATCH_MS = 7 * DAY_MS
FAR_LEASE_MS = 600_000
"""A later end of a lease was caused by a clock that was set back, and is shortened."""
CRASHES_TO_DEATH = 5


@dataclass(slots=True)
class KnownJob:
    """One job to which a submit replied `created`."""

    id: str
    tenant: str
    payload: bytes
    batch: str | None = None
    twin: str | None = None
    idem: str | None = None
    digest: str = ""
    boxes: frozenset[str] = frozenset()
    """Outboxes that receive its outcome: '' for webhooks, otherwise a relay's name."""
    max_attempts: int = 3
    deadline_ms: float = float("inf")
    affinity: str | None = None
    model: str = ""
    revision: str | None = None
    """The key that it names."""
    parents: tuple[str, ...] = ()
    """The jobs it waits for."""
    is_lenient: bool = False
    """It runs regardless of their outcomes."""
    reads: bool = False
    """It receives their outputs."""

    is_invalid: bool = False
    """A row that is not a job: it finished when it was submitted."""
    is_metered: bool = False
    """A worker reported its usage with its outcome."""
    token: int = 0
    """The last token that was issued."""
    is_held: bool = False
    """Its last token was not returned."""
    lease_until_ms: float = 0.0
    has_stepped: bool = False
    has_advanced: bool = False
    crashes: int = 0
    """An upper bound: executions that entered a step, made no progress, and were taken over."""
    failures: int = 0
    is_cancelled: bool = False
    """A cancel was requested."""
    entries: list[bytes] = field(default_factory=list)
    lengths: Counter[int] = field(default_factory=Counter)

    state: str = "queued"
    """As last seen; permanent, once it is terminal."""
    finished_at_ms: float = 0.0
    text: str = ""
    """The outcome of its one commit."""
    told: set[str] = field(default_factory=set)
    """Outboxes that returned its outcome."""
    settled: set[str] = field(default_factory=set)
    is_fed: bool = False
    """Its outcome was read in its batch's feed."""
    is_freed: bool = False
    """Acknowledged, or purged: its record may no longer exist."""
    is_purged: bool = False

    @property
    def has_ended(self) -> bool:
        return self.state in END_STATES

    def must_live_until_ms(self) -> float:
        """Its record exists at least until then; `inf` while it has not finished."""
        if not self.has_ended:
            return float("inf")
        if self.boxes - self.settled:
            return self.finished_at_ms + NOTICE_MS
        if self.is_freed:
            return 0.0
        if self.batch:
            return self.finished_at_ms + BATCH_MS
        return self.finished_at_ms + RECORD_MS.get(self.state, DAY_MS)


@dataclass
class Ledger:
    """All jobs ever created."""

    jobs: dict[str, KnownJob] = field(default_factory=dict)
    batches: dict[str, list[str]] = field(default_factory=dict)
    holders: dict[str, str] = field(default_factory=dict)
    """Idempotency key -> the last job that was created with it."""
    active: set[str] = field(default_factory=set)
    now_ms: float = 0.0
    latest_ms: float = 0.0
    """The latest time of the clock: expired data stays expired."""

    def set_time(self, now_ms: float) -> None:
        """The server's clock. If it was set back, jobs that had expired before may have been taken over, and
        a lease that is now far in the future is shortened."""
        if now_ms < self.now_ms:
            for job in self.jobs.values():
                if job.has_ended:
                    # A week from now on is enough.
                    job.finished_at_ms = min(job.finished_at_ms, now_ms)
                elif not self.now_ms < job.lease_until_ms <= now_ms + FAR_LEASE_MS:
                    job.lease_until_ms = 0.0
        self.now_ms = now_ms
        self.latest_ms = max(self.latest_ms, now_ms)

    def created(self, job: KnownJob) -> None:
        assert job.id not in self.jobs, f"{job.id} was created twice"
        self.jobs[job.id] = job
        self.active.add(job.id)
        if job.batch:
            self.batches.setdefault(job.batch, []).append(job.id)
        if job.idem:
            self._check_free(job)
            self.holders[job.idem] = job.id

    def _check_free(self, job: KnownJob) -> None:
        """A key represents a job that waits, runs, or succeeded (while its record exists), unless a client
        has requested its cancellation or its deadline has passed."""
        holder = self.jobs.get(self.holders.get(job.idem or "", ""))
        if holder is not None:
            is_to_end = holder.is_cancelled or holder.deadline_ms <= self.latest_ms
            assert holder.has_ended or is_to_end, (
                f"{job.id}: the key {job.idem} is {holder.id}'s, which is {holder.state}"
            )
            kept = BATCH_MS if holder.batch else DAY_MS
            is_forgotten = self.latest_ms >= holder.finished_at_ms + kept or holder.is_freed
            assert holder.state != "succeeded" or is_forgotten, f"{holder.id} succeeded under {job.idem}"

    def refused(self, idem: str, digest: str, word: str, other: str) -> None:
        """A submit received the reply that its key belongs to another job."""
        holder = self.jobs[other]
        assert holder.idem == idem, f"{other} never had the key {idem}"
        assert (holder.digest == digest) == (word == "same")
        # A waiting job may have ended in that very call, after the key lookup: its parent had failed before.
        assert not holder.has_ended or holder.state == "succeeded" or holder.parents

    def pulled(
        self, job_id: str, token: int, payload: bytes, entries: Iterable[bytes], until_ms: float
    ) -> None:
        job = self.jobs[job_id]
        assert not job.has_ended, f"{job_id} is {job.state} and was given to a worker"
        assert token > job.token, f"{job_id} got token {token} after {job.token}"
        assert not self.is_surely_held(job), f"{job_id} was given to two workers"
        own, _, _ = payload[len(job.payload) :].partition(b"\x1e")
        assert payload.startswith(job.payload), f"{job_id} has another payload"
        assert not own, f"{job_id} has a longer payload"
        assert job.reads or len(payload) == len(job.payload), f"{job_id} was given what it does not read"
        for parent in map(self.jobs.__getitem__, job.parents):
            assert parent.has_ended or parent.is_freed, f"{job_id} runs, and {parent.id} is {parent.state}"
            is_fine = job.is_lenient or parent.state == "succeeded"
            assert is_fine, f"{job_id} runs, and {parent.id} is {parent.state}"
        assert list(entries) == job.entries, f"{job_id} lost its checkpoint, or part of it"
        if job.is_held and job.has_stepped and not job.has_advanced:
            job.crashes += 1
        job.token, job.is_held = token, True
        job.has_stepped = job.has_advanced = False
        job.lease_until_ms = until_ms

    def is_surely_held(self, job: KnownJob) -> bool:
        """No other worker can have taken it over, so its worker's writes must be accepted."""
        is_leased = job.is_held and job.lease_until_ms > self.now_ms
        return is_leased and not job.is_cancelled and job.deadline_ms > self.latest_ms

    def may_write(self, job: KnownJob, token: int) -> bool:
        """A worker with this token may still change the job."""
        return job.is_held and token == job.token and not job.has_ended

    def committed(self, job: KnownJob, token: int, state: str, text: str) -> None:
        assert self.may_write(job, token), f"{job.id} took a stale commit by {token}, its last is {job.token}"
        assert not job.text, f"{job.id} was committed twice"
        job.text = text
        self.ended(job, state, self.now_ms)

    def given_back(self, job: KnownJob, token: int) -> None:
        assert self.may_write(job, token), f"{job.id} took a stale hand-back by {token}"
        job.is_held = False

    def failed_attempt(self, job: KnownJob, token: int, *, is_dead: bool) -> None:
        self.given_back(job, token)
        job.failures += 1
        assert is_dead == (job.failures >= job.max_attempts), (
            f"{job.id}: {job.failures} of {job.max_attempts}"
        )
        if is_dead:
            self.ended(job, "dead", self.now_ms)

    def ended(self, job: KnownJob, state: str, at_ms: float) -> None:
        assert not job.has_ended or job.state == state, f"{job.id} was {job.state} and is {state}"
        if not job.has_ended:
            job.state, job.finished_at_ms, job.is_held = state, at_ms, False
            self.active.discard(job.id)

    def seen(self, job: KnownJob, state: str | None, finished_at_ms: float, leader: str | None) -> None:
        """The server reports this state for the job; None: it does not know such a job."""
        if state is None:
            assert self.latest_ms >= job.must_live_until_ms(), f"{job.id} was lost, it was {job.state}"
        elif job.has_ended:
            assert state == job.state, f"{job.id} was {job.state} for ever, and is {state}"
            job.finished_at_ms = min(job.finished_at_ms, finished_at_ms)
        elif state in ACTIVE_STATES:
            job.state = state
        else:
            self._check_reason(job, state, self.jobs.get(leader or ""))
            self.ended(job, state, finished_at_ms)

    def _check_reason(self, job: KnownJob, state: str, leader: KnownJob | None) -> None:
        """A job ends only by a commit, a cancel, a deadline, or the crash of five workers."""
        match state:
            case "cancelled" if job.parents and not job.is_lenient:
                states = [self.jobs[parent].state for parent in job.parents]
                is_bereft = any(state != "succeeded" for state in states)
                assert job.is_cancelled or is_bereft, f"{job.id} was cancelled by nobody"
            case "failed" if job.reads:
                pass  # an output may be too large
            case "cancelled":
                assert job.is_cancelled, f"{job.id} was cancelled by nobody"
            case "expired":
                assert job.deadline_ms <= self.latest_ms, f"{job.id} expired before its time"
            case "dead" if leader is None:
                crashes = job.crashes + (job.has_stepped and not job.has_advanced)
                assert crashes >= CRASHES_TO_DEATH, f"{job.id} is dead after {crashes} crashes"
            case _:
                assert leader is not None, f"{job.id} is {state}, and nobody committed it"
                assert leader.twin == job.twin, f"{job.id} shares the end of a stranger, {leader.id}"
                assert leader.state == state, f"{job.id} is {state}, its leader {leader.state}"

    def told(self, job_id: str, box: str) -> None:
        job = self.jobs[job_id]
        assert box in job.boxes, f"{job_id} was told to {box or 'a webhook'}, which nobody asked for"
        assert job.has_ended, f"the end of {job_id} was told before it came"
        assert box not in job.settled, f"the end of {job_id} was told to {box} after it was settled"
        job.told.add(box)

    def fed(self, job_id: str) -> None:
        job = self.jobs[job_id]
        assert job.has_ended, f"{job_id} is in the feed of its batch and has not ended"
        assert not job.is_fed, f"{job_id} is in the feed of its batch twice"
        job.is_fed = True

    def counts(self, ids: Iterable[str] | None = None) -> dict[str, int]:
        """Jobs by state, as last seen."""
        return dict(Counter(self.jobs[job_id].state for job_id in (self.jobs if ids is None else ids)))
