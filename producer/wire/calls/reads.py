"""Reads of a producer, as calls: status, outcome, token feed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from pydantic_core import from_json

from pagemill.common.gc_pause import gc_paused
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.checkpoints import partial_outputs, read_deltas
from pagemill.producer.wire.schema.errors import (
    JOB_ERRORS,
    InvalidJob,
    JobError,
    JobNotFound,
    PagemillError,
    ResultExpired,
    StoreError,
)
from pagemill.producer.wire.schema.outputs import (
    ACTIVE_STATES,
    END_STATES,
    Delta,
    EndState,
    ErrorInfo,
    JobStatus,
    Progress,
    Result,
    State,
    Timing,
)
from pagemill.producer.wire.schema.sealing import SealedError, opened, opened_metadata
from pagemill.producer.wire.server.scripts import Call, as_map, listed
from pagemill.producer.wire.store.stub import Reference, read_result_stub

DAMAGED = "payload_lost"
"""The code of a record that cannot be read."""
FEED_ENTRIES = 256
"""Maximum number of deltas that one read of a feed returns."""


def result_expired(job_id: str) -> ResultExpired:
    """Return the error for a job that succeeded and whose result no longer exists."""
    return ResultExpired(
        f"the result of job {job_id} was removed after its time to live: submit the job again"
    )


@dataclass(frozen=True, slots=True)
class StoredResult:
    """A result in a store, and the data to parse its JSON."""

    reference: Reference
    parse: Callable[[bytes], Result]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The end of a job. `state` is None for an unknown job; result and error are None until it ends."""

    job_id: str
    state: State | None
    key: str = ""
    metadata: dict[str, Any] | None = None
    result: Result | None = None
    error: ErrorInfo | None = None
    stored: StoredResult | None = None
    """The result, if it is in a store: `loaded` adds it."""
    is_superseded: bool = False
    """A recall replaced the first result."""

    def loaded(self, data: bytes) -> Outcome:
        """Return the outcome with a result that was read from its store. Raises ValueError if it is not a result."""
        assert self.stored is not None
        return replace(self, result=self.stored.parse(data), stored=None)

    def value(self) -> Result | None:
        """Return the result; None while the job has not ended. Raises the error of any other outcome."""
        if self.state is None:
            raise JobNotFound.for_job(self.job_id)
        if self.stored is not None:
            raise StoreError("the result is in a store and was not read")
        if self.state == "succeeded" and self.result is None and self.error is not None:
            if self.error.code == DAMAGED:
                raise InvalidJob(self.error.message, DAMAGED)
            raise SealedError(self.error.message)
        if self.state == "succeeded" and self.result is None:
            raise result_expired(self.job_id)
        if self.state in JOB_ERRORS:
            raise self.job_error()
        return self.result

    def job_error(self) -> JobError:
        """Return the exception for this outcome; only for a job that ended without a result."""
        assert self.state in JOB_ERRORS
        error = self.error or ErrorInfo(
            code="", message=f"the job is {self.state}; the reason has been removed"
        )
        return JOB_ERRORS[self.state](error.message, error.code, error.retryable, error.partial)


@dataclass(frozen=True, slots=True)
class Recorded:
    """The stored parts of a job's submission and of its end, if it has ended."""

    outcome: Outcome | None
    """None: the record is damaged."""
    payload: bytes
    """The job as submitted; empty if it has ended and its input was not kept."""
    submitted_at: float


@dataclass(frozen=True, slots=True)
class Feed:
    """Updates of a streaming job: deltas since the requested position, and the outcome once it has ended.

    `epoch` changes when the job restarts from its prompt; the deltas then count from position 0.
    """

    state: State | None
    epoch: int
    attempt: int
    deltas: list[Delta]
    result: Result | None
    stored: StoredResult | None = None
    """The result, if it is in a store."""

    @property
    def is_cut(self) -> bool:
        """Return whether more deltas may already be available."""
        return len(self.deltas) == FEED_ENTRIES

    @property
    def end(self) -> EndState | None:
        """Return the terminal state, once reached."""
        return next((state for state in END_STATES if state == self.state), None)


@dataclass(frozen=True, slots=True)
class _End:
    """The data to read a result; `copied_s` is the time from submission to end of a duplicate job."""

    job_id: str
    leader: str
    """The job that computed it, if it was another one."""
    copied_s: float | None = None
    metadata: dict[str, Any] | None = None


STATUS_CHUNK = 500
"""Number of jobs per call."""


def server_time(queue: str) -> Call[float]:
    """Return the server's clock in Unix seconds."""
    return Call("server_time", (keys.prefix(queue),), (), lambda reply: int(reply) / 1000)


def statuses(queue: str, job_ids: Sequence[str]) -> Call[list[JobStatus | None]]:
    """Return the statuses of the first jobs, up to about 1 MiB; None for an unknown job.

    Long messages of errors are cut after 4 KiB of the error.
    """
    parse = partial(_statuses, queue, tuple(job_ids))
    return Call("status", (keys.prefix(queue),), tuple(job_ids), parse)


def status_pages(
    run: Callable[[Call[list[JobStatus | None]]], list[JobStatus | None]], queue: str, job_ids: Sequence[str]
) -> Iterator[list[JobStatus | None]]:
    """Yield the statuses of all of the jobs, reply by reply."""
    while job_ids:
        page = run(statuses(queue, job_ids[:STATUS_CHUNK]))
        yield page
        job_ids = job_ids[len(page) :]


def ends(queue: str, job_ids: Sequence[str]) -> Call[list[bool]]:
    """Return for each job whether it has ended or is unknown."""
    return Call("ends", (keys.prefix(queue),), tuple(job_ids), lambda reply: [bool(ended) for ended in reply])


def outcome(queue: str, job_id: str) -> Call[Outcome]:
    """Return the end of a job, if it has ended."""
    return Call("outcome", (keys.prefix(queue),), (job_id,), read_outcome)


def recorded(queue: str, job_id: str) -> Call[Recorded]:
    """Return the end of a job, if it has ended, and its payload, if it waits, runs, or was kept."""
    return Call("recorded", (keys.prefix(queue),), (job_id,), _recorded)


def feed(queue: str, job_id: str, epoch: int, position: int) -> Call[Feed]:
    """Return deltas from `position` on, counted in the feed of `epoch`."""
    args = (job_id, epoch, position, FEED_ENTRIES)
    return listed("feed", (keys.prefix(queue),), args, partial(_feed, job_id))


def read_outcome(record: list[Any]) -> Outcome:
    """Parse an end record as the scripts return it. A damaged record becomes an outcome with that error."""
    try:
        return _outcome(record)
    except PagemillError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        found = as_map(record)
        job_id, word = found["id"].decode(), found["state"].decode(errors="replace")
        message = f"the stored record of job {job_id} is damaged: {type(error).__name__}"
        state: Any = word if word in END_STATES else "failed"
        key = found.get("key", b"").decode(errors="replace")
        return Outcome(job_id=job_id, state=state, key=key, error=ErrorInfo(code=DAMAGED, message=message))


def _outcome(record: list[Any]) -> Outcome:
    found = as_map(record)
    job_id, out, leader = found["id"].decode(), found.get("outcome", b""), found.get("leader", b"").decode()
    word: Any = found["state"].decode() if "state" in found else None
    if word not in (None, *ACTIVE_STATES, *END_STATES):
        raise ValueError(word)
    own_metadata = opened_metadata(found.get("metadata", b""), job_id)
    copied_s = max(0.0, (int(found["finished_at"]) - int(found["at"])) / 1000) if leader else None
    parse = partial(_result, _End(job_id, leader, copied_s, own_metadata))
    stored = _stored(out, parse) if word == "succeeded" else None
    result, error = None, None
    if word == "succeeded" and out and stored is None:
        try:
            result = parse(out)
        except SealedError as sealed:
            error = ErrorInfo(code=sealed.code, message=str(sealed))
    elif word in JOB_ERRORS and out:
        error = _error(job_id, out, found.get("entries", []))
    return Outcome(
        job_id=job_id,
        state=word,
        key=found.get("key", b"").decode(),
        metadata=own_metadata,
        result=result,
        stored=stored,
        error=error,
        is_superseded="superseded_at" in found,
    )


def _recorded(reply: list[Any]) -> Recorded:
    record, payload, *_ = reply
    try:
        return Recorded(_outcome(record), payload, int(as_map(record).get("at", 0)) / 1000)
    except (ValueError, TypeError, LookupError):
        return Recorded(None, payload, 0.0)


def _stored(out: bytes, parse: Callable[[bytes], Result]) -> StoredResult | None:
    reference = read_result_stub(out)
    return None if reference is None else StoredResult(reference, parse)


def _result(end: _End, out: bytes) -> Result:
    """Parse a result. Raises SealedError."""
    result = _own_result(out, end.job_id, end.leader or end.job_id)
    if end.copied_s is None:
        return result
    return result.model_copy(update={"timing": Timing(e2e_s=end.copied_s), "metadata": end.metadata})


def _own_result(out: bytes, job_id: str, computed_by: str) -> Result:
    """Return a result with the id of `job_id`: duplicate jobs share the result of the job that ran."""
    with gc_paused():
        result = Result.model_validate_json(opened(out, "result", computed_by))
    if result.id == job_id:
        return result
    return result.model_copy(update={"id": job_id, "copied_from": result.id})


def _error(job_id: str, out: bytes, entries: list[bytes]) -> ErrorInfo:
    """Return the recorded error; partial output that the worker did not send is read from the checkpoint."""
    error = ErrorInfo.model_validate_json(out)
    return error if error.partial else error.model_copy(update={"partial": partial_outputs(job_id, entries)})


def _feed(job_id: str, reply: list[Any]) -> Feed:
    found = as_map(reply)
    word: Any = found["state"].decode() if "state" in found else None
    out = found.get("outcome", b"")
    parse = partial(_result, _End(job_id, found.get("leader", b"").decode()))
    stored = _stored(out, parse) if word == "succeeded" else None
    result = parse(out) if word == "succeeded" and out and stored is None else None
    deltas = read_deltas(job_id, found["entries"])
    return Feed(word, found["epoch"], found["attempt"], deltas, result, stored)


def _statuses(queue: str, job_ids: tuple[str, ...], reply: list[list[Any]]) -> list[JobStatus | None]:
    return [_status(queue, job_id, row) if row else None for job_id, row in zip(job_ids, reply, strict=False)]


_HELD = {"running": "already runs as many jobs as it may", "quota": "has used its quota"}
"""The reason for which a job is held back, by the word of status.lua."""


def _status(queue: str, job_id: str, row: list[Any]) -> JobStatus:
    """Parse a job's state. Raises InvalidJob for a damaged record."""
    try:
        return _read_status(queue, job_id, row)
    except PagemillError:
        raise
    except (ValueError, TypeError, LookupError) as error:
        message = f"the stored record of job {job_id} is damaged: {type(error).__name__}"
        raise InvalidJob(message, DAMAGED) from error


def _read_status(queue: str, job_id: str, row: list[Any]) -> JobStatus:
    found = as_map(row)
    text = {name: value.decode(errors="ignore") for name, value in found.items() if isinstance(value, bytes)}
    lane, waits_for = text["lane"], tuple(text.get("waits", "").split())
    _, priority, tenant, model = keys.split_lane(lane)
    reason = None
    if "error" in found:
        error = found["error"].decode(errors="ignore")
        document: dict[str, str] = from_json(error, allow_partial="trailing-strings")
        reason = document.get("message", "")
    if text["state"] == "queued" and "leader" not in found and not found["live_workers"]:
        reason = _unserved(model, keys.pinned_revision(lane), text.get("revisions", "").split())
    elif "unmet" in found:
        words = ", ".join(keys.needed_words(lane))
        reason = f"no live worker of model {model} knows all that the job needs: {words}"
    elif "held" in text:
        reason = f"tenant {tenant} {_HELD[text['held']]}; see pagemill queue quota {tenant}"
    if waits_for:
        others = f" and {len(waits_for) - 1} more" if len(waits_for) > 1 else ""
        reason = f"it waits for the end of job {waits_for[0]}{others}"
    return JobStatus(
        id=job_id,
        state=text["state"],  # type: ignore[arg-type]
        queue=queue,
        model=model,
        tenant=tenant,
        priority=priority,
        attempt=int(text.get("attempt", 0)),
        crashes=int(text.get("crashes", 0)),
        position=found.get("position"),
        created_at=int(text["at"]) / 1000,
        started_at=_seconds(text.get("started_at")),
        finished_at=_seconds(text.get("finished_at")),
        deadline=_seconds(text.get("deadline")),
        worker=text.get("worker"),
        progress=unpack_progress(text.get("progress"), text.get("progress_at")),
        error=reason,
        leader=text.get("leader"),
        replay_of=text.get("replay_of"),
        waits_for=waits_for,
        metadata=opened_metadata(found.get("metadata"), job_id),
    )


def _unserved(model: str, revision: str | None, served: Sequence[str]) -> str:
    if revision is None:
        return f"no live worker serves it (model {model})"
    others = f"live workers serve {', '.join(served)}" if served else "no live worker names one"
    return f"no live worker serves revision {revision} of model {model}: {others}"


def _seconds(milliseconds: str | bytes | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None


def unpack_progress(packed: str | None, updated_at: str | bytes | None) -> Progress:
    """Parse progress as stored in a job's record."""
    if not packed:
        return Progress()
    phase, *counts = packed.split(" ")
    done, prompt, generated, most, *blocks = map(int, counts)
    return Progress(
        phase=phase,  # type: ignore[arg-type]
        prompt_tokens_done=done,
        prompt_tokens=prompt,
        generated_tokens=generated,
        max_tokens=most,
        kv_blocks=blocks[0] if blocks else 0,
        updated_at=_seconds(updated_at) or 0.0,
    )
