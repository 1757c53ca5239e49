"""The life of a job as atomic transitions. Each function returns a `Call`; nothing here talks to a server.

A worker's transitions carry the fencing token that `pull` issued. A token that is no longer the job's is
refused and changes nothing. Batches and the reading side are in collections.py, workers in registry.py.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from producer.wire.outputs import (
    Checkpoint,
    Delta,
    EndState,
    ErrorInfo,
    Progress,
)
from producer.wire.scripts import Call

DEFAULT_QUEUE_LIMIT = 1_000_000
"""Jobs that may be queued or delayed, unless the queue's own limit is set."""
LEASE_MS = 6000
SWEEP_LIMIT = 64
"""Lapsed leases, due jobs and deadlines that one sweep handles at most, each."""
RETRY_CAP_S = 60.0

SubmitStatus = Literal["created", "exists", "same", "conflict", "full"]
CheckpointReply = Literal["ok", "stale", "bad_offset", "cancelled"]
CommitReply = Literal["committed", "fenced", "already_done", "cancelled", "expired"]
RetryReply = Literal["retrying", "dead", "fenced", "already_done", "cancelled", "expired"]
ReleaseReply = Literal["released", "fenced", "already_done", "cancelled", "expired"]
CancelReply = Literal["cancelled", "requested", "done", "missing"]


@dataclass(frozen=True, slots=True)
class Submission:
    """One job on its way in: its id, the header the script reads, and the envelope it stores."""

    job_id: str
    header: bytes
    payload: bytes


@dataclass(frozen=True, slots=True)
class SubmitReply:
    """What became of one submission.

    created; exists: this id was submitted before; same or conflict: the idempotency key belongs to
    `job_id`, with an equal or another payload; full: the queue's limit is reached, nothing was stored.
    """

    status: SubmitStatus
    job_id: str


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A job that this worker now holds, until its lease lapses."""

    job_id: str
    token: int
    payload: bytes
    """The envelope: `Job.from_payload(payload)` validates it."""
    checkpoint: Checkpoint | None
    attempt: int
    """1 for the first execution; grows with retryable errors, not with crashes or hand-backs."""
    crashes: int
    alone: bool
    """The job is a suspect: nothing else may run beside it."""
    submitted_at: float
    deadline: float | None
    """Unix seconds; the worker stops the job then and commits `expired`."""


@dataclass(frozen=True, slots=True)
class SweepReply:
    """What a sweep did, and in how many milliseconds the next delayed job is due (None: there is none)."""

    reclaimed: int = 0
    dead: int = 0
    cancelled: int = 0
    expired: int = 0
    promoted: int = 0
    next_due_ms: int | None = None


@dataclass(frozen=True, slots=True)
class PullReply:
    jobs: list[PulledJob]
    swept: SweepReply
    paused: bool
    waiting: int
    """Jobs of these models that are still queued."""

    @property
    def cancelled(self) -> int:
        return self.swept.cancelled

    @property
    def expired(self) -> int:
        return self.swept.expired

    @property
    def next_due_ms(self) -> int | None:
        return self.swept.next_due_ms


@dataclass(frozen=True, slots=True)
class RenewReply:
    lost: list[str]
    """Held no longer: stop them, commit nothing."""
    cancelled: list[str]
    """Still held, but to be stopped and committed as cancelled or expired, with what there is."""


def submit(
    queue: str,
    submissions: Sequence[Submission],
    *,
    batch_id: str | None = None,
    limit: int = DEFAULT_QUEUE_LIMIT,
) -> Call[list[SubmitReply]]:
    """Store jobs and let them wait; all that fit under the queue's limit, in order. One reply per job."""
    raise NotImplementedError


def pull(
    queue: str,
    worker_id: str,
    models: Sequence[str],
    max_jobs: int,
    max_cost_tokens: int,
    lease_ms: int = LEASE_MS,
    *,
    holding: int = 0,
) -> Call[PullReply]:
    """Sweep, then lease up to `max_jobs` jobs that together cost at most `max_cost_tokens`.

    `holding` is how many jobs the worker has now. At 0 the first job comes whatever it costs (the engine says
    never_fits, if so), and a suspect may come, alone. While this worker holds a suspect, no job comes.
    """
    raise NotImplementedError


def renew(
    queue: str, worker_id: str, held: Sequence[tuple[str, int]], lease_ms: int = LEASE_MS
) -> Call[RenewReply]:
    """Extend the leases of (job id, token) pairs whose token is still the job's."""
    raise NotImplementedError


def checkpoint(
    queue: str,
    job_id: str,
    token: int,
    progress: Progress,
    deltas: Sequence[Delta] = (),
    *,
    fingerprint: str = "",
    restart: bool = False,
) -> Call[CheckpointReply]:
    """Write progress, and append what was generated since the last checkpoint; all deltas or none.

    A phase other than "waiting" marks the job as having entered a step: call it with no deltas before a
    job's first step, since only then a lost lease counts as a crash. `restart` drops what was checkpointed
    before: for an execution that begins at the prompt again. `cancelled`: written, but stop the job.
    """
    raise NotImplementedError


def commit(
    queue: str,
    job_id: str,
    token: int,
    state: EndState,
    result_json: str | bytes | None = None,
    error_json: str | bytes | None = None,
) -> Call[CommitReply]:
    """End the job. `succeeded` takes a Result as JSON, every other state an ErrorInfo.

    A job whose cancel or expiry was recorded before ends so, whatever `state` says; the reply says which.
    """
    raise NotImplementedError


def retry(
    queue: str, job_id: str, token: int, error: ErrorInfo, delay_s: float, *, restart: bool = False
) -> Call[RetryReply]:
    """Count a failed attempt; the job comes back after `delay_s` at its old rank, or is dead at its cap.

    `restart`: drop the checkpoint, so that the next attempt starts from the prompt.
    """
    raise NotImplementedError


def release(queue: str, job_id: str, token: int) -> Call[ReleaseReply]:
    """Hand the job back at its old rank. Counts neither as attempt nor as crash."""
    raise NotImplementedError


def cancel(queue: str, job_ids: Sequence[str]) -> Call[list[CancelReply]]:
    """End waiting jobs, and ask for the end of running ones (`requested`)."""
    raise NotImplementedError


def sweep(queue: str, limit: int = SWEEP_LIMIT) -> Call[SweepReply]:
    """Reclaim lapsed leases, promote due jobs, end what is past its deadline, purge what is past its time."""
    raise NotImplementedError


def retry_delay(attempt: int) -> float:
    """Seconds before attempt `attempt` + 1: full jitter under min(60, 2**attempt)."""
    return random.uniform(0.0, min(RETRY_CAP_S, 2.0**attempt))
