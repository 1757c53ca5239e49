"""The life of a job as atomic transitions. Each function returns a `Call` without contacting a server.

A worker's transitions carry the fencing token that `pull` issued. A stale token is rejected and changes
nothing. Reads are in reads.py, batches in batches.py, workers in registry.py.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pagemill.common.backoff import pause_after
from pagemill.common.sampling_fields import MAX_TOKEN_ID
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.checkpoints import merge_checkpoint
from pagemill.producer.wire.schema.needs import known_words
from pagemill.producer.wire.schema.outputs import Checkpoint, Delta, EndState, ErrorInfo, Progress
from pagemill.producer.wire.server.scripts import Call, as_map, listed

LEASE_MS = 6000
SWEEP_LIMIT = 64
"""Maximum number of lapsed leases, due jobs and deadlines that one sweep handles, each."""
RETRY_CAP_S = 60.0

CheckpointReply = Literal["ok", "stale", "bad_offset", "cancelled"]
CommitReply = Literal["committed", "fenced", "already_done", "cancelled", "expired"]
RetryReply = Literal["retrying", "dead", "fenced", "already_done", "cancelled", "expired"]
ReleaseReply = Literal["released", "fenced", "already_done", "cancelled", "expired"]
CancelReply = Literal["cancelled", "requested", "done", "missing"]


@dataclass(frozen=True, slots=True)
class PulledJob:
    """A job that a worker holds until its lease lapses."""

    job_id: str
    token: int
    payload: bytes
    """The envelope, which `Job.from_payload(payload)` validates, and the outputs of its parents."""
    fingerprint: str
    """The fingerprint of the model that computed the checkpoint; empty if there is none."""
    entries: tuple[bytes, ...]
    """The checkpoint as stored, not parsed, so that an invalid entry affects only this job."""
    attempt: int
    """1 for the first execution; incremented by retryable errors, not by crashes or requeues."""
    crashes: int
    alone: bool
    """The job is a suspect: no other job may run at the same time."""
    submitted_at: float
    deadline: float | None
    """Unix seconds at which the worker stops the job and commits `expired`."""
    taken_over_from: str = ""
    """The worker whose lease of it lapsed; empty if the job was not lost."""
    cost: int = 0
    """Tokens, as stated at submission."""
    estimate: str = ""
    """The estimate of its end (estimates.py); empty if there is none."""
    received_at: float = field(default_factory=time.monotonic, compare=False)
    """`time.monotonic()` of the reply."""

    @property
    def checkpoint(self) -> Checkpoint | None:
        """Return the merged entries, otherwise unchecked. Raises ValueError if they are not a checkpoint."""
        return merge_checkpoint(self.entries, self.fingerprint, job_id=self.job_id)


@dataclass(frozen=True, slots=True)
class SweepReply:
    """The counts of a sweep, the ms until the next delayed job (None: none), and the crashes of dead jobs."""

    reclaimed: int = 0
    dead: int = 0
    cancelled: int = 0
    expired: int = 0
    promoted: int = 0
    next_due_ms: int | None = None
    buried: tuple[tuple[str, int], ...] = ()
    lapsed: tuple[tuple[str, str], ...] = ()
    """Jobs whose leases lapsed, each with the worker that held it."""
    memory: Literal["ok", "near", "full"] = "ok"
    """Set by sweeps only: whether the server's memory is near the queue's limit, or jobs are rejected for it."""


@dataclass(frozen=True, slots=True)
class PullReply:
    jobs: list[PulledJob]
    swept: SweepReply
    paused: bool
    queued: int
    """Waiting jobs of all models; 0 if this worker cannot take any of them now."""
    limited_ms: int | None = None
    """Time until the queue's rate limit allows the next job to start; None: now."""
    bells: tuple[str, ...] = ()
    """During a rollout: the names whose jobs the worker may take; empty if it may take all that it serves."""

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
    """No longer held: stop them, commit nothing."""
    cancelled: list[str]
    """Still held: stop them, and commit them as cancelled or expired with their partial output."""


def pull(
    queue: str,
    worker_id: str,
    models: Sequence[str],
    max_jobs: int,
    max_cost_tokens: int,
    lease_ms: int = LEASE_MS,
    *,
    holding: int = 0,
    longest: int = MAX_TOKEN_ID,
    urgent_only: bool = False,
    has_store: bool = False,
    lacks: Collection[str] = (),
) -> Call[PullReply]:
    """Sweep, then lease up to `max_jobs` jobs with a total cost of up to `max_cost_tokens`.

    `longest` is the maximum tokens of a sample on this worker: a job's cost is capped to it per sample.
    `holding` is the number of jobs the worker holds. At 0 the first job is leased regardless of its cost (the
    engine reports never_fits if necessary), and a suspect may be leased, alone. While a worker holds a
    suspect, no job is leased. `urgent_only`: leave jobs of normal and low priority to others. `has_store`:
    also pull jobs in a store. `lacks`: the abilities that the engine does not have.
    """
    limits = (lease_ms, max_jobs, max_cost_tokens, holding)
    classes = "0" if urgent_only else "012"
    args: tuple[str | int, ...] = (
        worker_id,
        *limits,
        longest,
        known_words(has_store=has_store, lacks=lacks),
        classes,
        *models,
    )
    return Call("pull", (keys.prefix(queue),), args, _pull_reply)


def renew(
    queue: str, worker_id: str, held: Sequence[tuple[str, int]], lease_ms: int = LEASE_MS
) -> Call[RenewReply]:
    """Extend the leases of (job id, token) pairs whose token is still the job's."""
    del worker_id  # the token alone identifies the holder
    pairs = [part for pair in held for part in pair]
    return Call("renew", (keys.prefix(queue),), (lease_ms, *pairs), _renew_reply)


def checkpoint(
    queue: str,
    job_id: str,
    token: int,
    progress: Progress,
    deltas: Sequence[Delta] = (),
    *,
    fingerprint: str = "",
    restart: bool = False,
    sign: Callable[[bytes], bytes] = bytes,
) -> Call[CheckpointReply]:
    """Write progress, and append the tokens generated since the last checkpoint; all deltas or none.

    A phase other than "waiting" marks the job as having entered a step: call this without deltas before a
    job's first step, since only then does a lost lease count as a crash. `restart` drops the earlier
    checkpoint, for an execution that starts over from the prompt. `sign` makes an entry of a delta's JSON;
    equal deltas must result in equal entries. `cancelled`: written, but stop the job.
    """
    args: list[str | bytes | int] = [job_id, token, _pack_progress(progress), fingerprint, int(restart)]
    for delta in deltas:
        args += [
            delta.index,
            delta.offset,
            len(delta.token_ids),
            sign(delta.model_dump_json(exclude_defaults=True).encode()),
        ]
    return listed("checkpoint", (keys.prefix(queue),), tuple(args), _word)


def commit(
    queue: str,
    job_id: str,
    token: int,
    state: EndState,
    result_json: str | bytes | None = None,
    error_json: str | bytes | None = None,
    progress: Progress | None = None,
    stored: str = "",
    used: JobUsage | None = None,
    spent: str = "",
) -> Call[CommitReply]:
    """End the job. `succeeded` takes a Result as JSON, every other state an ErrorInfo.

    `progress` is the job's last: with it a status never lags behind the result (the server dates it).
    `stored` is the URI of a result that lies in a store. A job whose cancellation or expiry was recorded
    before ends that way regardless of `state`; the reply contains the outcome. `used` is counted by the
    ledger (usage.py); without it, `progress` is. `spent`: the breakdown of the execution's time (account.py).
    """
    outcome = result_json if state == "succeeded" else error_json
    assert outcome is not None, f"{state} needs {'a result' if state == 'succeeded' else 'an error'}"
    packed = _pack_progress(progress) if progress is not None else ""
    args = (
        job_id,
        token,
        state,
        outcome,
        packed,
        stored,
        used.packed() if used is not None else "",
        *_optional(spent),
    )
    return listed("commit", (keys.prefix(queue),), args, _word)


def retry(
    queue: str,
    job_id: str,
    token: int,
    error: ErrorInfo,
    delay_s: float,
    *,
    restart: bool = False,
    used: JobUsage | None = None,
    spent: str = "",
) -> Call[RetryReply]:
    """Count a failed attempt; the job returns after `delay_s` at its earlier rank, or is dead after its last attempt.

    `restart`: drop the checkpoint, so that the next attempt starts from the prompt. `used`: as in `commit`,
    counted if it was the last attempt. `spent`: as in `commit`.
    """
    last = ErrorInfo(
        code="attempts_exhausted",
        cause=error.code,
        message=f"every attempt failed, the last with {error.code}: {error.message}",
        partial=error.partial,
    )
    errors = (error.model_dump_json(), last.model_dump_json())
    packed = used.packed() if used is not None else ""
    given = (job_id, token, round(delay_s * 1000), *errors, int(restart), packed)
    args: tuple[str | int, ...] = (*given, *_optional(spent))
    return Call("retry", (keys.prefix(queue),), args, _word)


def release(
    queue: str, job_id: str, token: int, needs: Sequence[str] = (), *, spent: str = "", restart: bool = False
) -> Call[ReleaseReply]:
    """Requeue the job at its earlier rank. Counts as neither an attempt nor a crash.

    `needs`: words that the next worker must know as well (`needs.ABILITIES`). `spent`: as in `commit`.
    `restart`: drop the checkpoint.
    """
    last = (spent, 1) if restart else _optional(spent)
    args: tuple[str | int, ...] = (job_id, token, "+".join(needs), *last)
    return Call("release", (keys.prefix(queue),), args, _word)


def cancel(queue: str, job_ids: Sequence[str]) -> Call[list[CancelReply]]:
    """End waiting jobs, and request the end of running ones (`requested`)."""
    return Call("cancel", (keys.prefix(queue),), tuple(job_ids), parse_words)


def sweep(queue: str, limit: int = SWEEP_LIMIT, patience_ms: int = 0) -> Call[SweepReply]:
    """Reclaim lapsed leases, promote due jobs, end jobs past their deadline, purge expired records.

    `patience_ms`: leases that lapsed more recently are skipped.
    """
    return Call("sweep", (keys.prefix(queue),), (limit, patience_ms), _sweep_reply)


def retry_delay(attempt: int) -> float:
    """Seconds before attempt `attempt` + 1: full jitter under min(60, 2**attempt)."""
    return pause_after(attempt, 2.0, RETRY_CAP_S, jitter=1.0)


def _word(reply: bytes) -> Any:
    return reply.decode()


def parse_words(reply: list[bytes]) -> Any:
    """Parse a reply of words, one per requested id."""
    return [word.decode() for word in reply]


def _sweep_reply(reply: list[Any]) -> SweepReply:
    found = as_map(reply)
    memory: tuple[Literal["ok", "near", "full"], ...] = ("ok", "near", "full")
    return SweepReply(
        reclaimed=found.get("reclaimed", 0),
        dead=found.get("dead", 0),
        cancelled=found.get("cancelled", 0),
        expired=found.get("expired", 0),
        promoted=found.get("promoted", 0),
        next_due_ms=found.get("next_due"),
        buried=tuple((job_id.decode(), crashes) for job_id, crashes in found.get("buried", ())),
        lapsed=tuple((job_id.decode(), worker.decode()) for job_id, worker in found.get("lapsed", ())),
        memory=memory[found.get("memory", 0)],
    )


def _pull_reply(reply: list[Any]) -> PullReply:
    found = as_map(reply)
    return PullReply(
        jobs=[_pulled_job(*job) for job in found["jobs"]],
        swept=_sweep_reply(found["swept"]),
        paused=bool(found["paused"]),
        queued=found["queued"],
        limited_ms=found["limited"] if found["limited"] >= 0 else None,
        bells=tuple(name.decode() for name in found["bells"]),
    )


def _pulled_job(words: bytes, payload: bytes, entries: Sequence[bytes] = (), *_: Any) -> PulledJob:
    lines = words.decode(errors="replace").split("\n")
    found = {name: value for name, _, value in (line.partition("=") for line in lines)}
    deadline = found.get("deadline")
    return PulledJob(
        job_id=found["id"],
        token=int(found["token"]),
        payload=payload,
        fingerprint=found.get("fingerprint", ""),
        entries=tuple(entries),
        attempt=int(found["attempt"]),
        crashes=int(found.get("crashes", 0)),
        alone="alone" in found,
        submitted_at=int(found["at"]) / 1000,
        deadline=int(deadline) / 1000 if deadline else None,
        taken_over_from=found.get("lost_by", ""),
        cost=int(float(found["cost"])),
        estimate=found.get("estimate", ""),
    )


def _renew_reply(reply: list[list[bytes]]) -> RenewReply:
    lost, cancelled, *_ = reply
    return RenewReply(parse_words(lost), parse_words(cancelled))


def _optional(argument: str) -> tuple[str, ...]:
    """Return an argument that may be omitted at the end, or none."""
    return (argument,) if argument else ()


def _pack_progress(progress: Progress) -> str:
    """Return progress in a form short enough for the job hash's compact encoding (64 bytes per value)."""
    counts = (
        progress.prompt_tokens_done,
        progress.prompt_tokens,
        progress.generated_tokens,
        progress.max_tokens,
        progress.kv_blocks,
    )
    return " ".join((progress.phase, *map(str, counts)))
