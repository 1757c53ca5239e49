"""A job's last write on this worker (commit, retry, release or end of lease) and its reply."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from pagemill.fingerprint import digest_of
from pagemill.monitoring.counters import PromiseKept, WorkerCounters
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.metering.usage import Used
from pagemill.producer.wire.calls.promises import Estimate
from pagemill.producer.wire.calls.transitions import CheckpointReply, PulledJob, RenewReply
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.schema.sealing import KeyRing, ring
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.jobs.running_job import Ending, RunningJob, end_state


@dataclass(frozen=True, slots=True, eq=False)
class FinalWrite:
    """A write that may be sent any number of times: the server applies it once."""

    pulled: PulledJob
    kind: Literal["succeeded", "failed", "cancelled", "expired", "retried", "released", "lapsed"]
    call: Call[Any]
    job: RunningJob | None = None
    """None if it never became a request."""
    size: int = 0
    """Bytes of the result or the error."""
    needs_checkpoint: bool = False
    """The last tokens must be checkpointed first: as a partial result, the end of a stream or the resume
    point of the next execution."""
    new_tokens: int = 0
    """Tokens generated in this execution."""
    body: bytes = b""
    """The JSON of the result."""
    stored: str = ""
    """The URI of the result, if it lies in the store."""
    code: str = ""
    reason: str = ""
    """Why it ended without a result; quotes neither the prompt nor the output."""

    @property
    def job_id(self) -> str:
        return self.pulled.job_id

    @property
    def token(self) -> int:
        return self.pulled.token

    @property
    def key(self) -> str:
        return f"{self.pulled.job_id}#{self.pulled.token}"

    def settle(self, reply: Any, counters: WorkerCounters, now: float) -> str:
        """Count the write's outcome and return its name: a terminal state, or released, lapsed, retrying,
        fenced, already_done, error."""
        if self.size:
            counters.result_bytes.observe(self.size)
        if isinstance(reply, Exception):
            counters.commits.inc("error")
            return "error"
        if isinstance(reply, RenewReply):
            reply = "fenced" if reply.lost else "lapsed"
        if reply == "fenced":
            counters.commits.inc("fenced")
            counters.discarded_tokens.inc("fenced", self.new_tokens)
        elif reply == "already_done":
            counters.commits.inc("already_done")
        elif reply == "released":
            counters.jobs_handed_back.inc()
        elif reply == "lapsed":
            counters.leases_lost.inc()
        elif reply == "retrying":
            counters.job_retries.inc(self.code)  # type: ignore[arg-type]  # unknown codes count as other
        else:
            state = self.kind if reply == "committed" else str(reply)
            self._settle_end(state, counters, now)
            return state
        return str(reply)

    def _settle_end(self, state: Any, counters: WorkerCounters, now: float) -> None:
        counters.commits.inc("committed")
        counters.jobs_finished.inc(state)
        counters.attempts.observe(self.pulled.attempt)
        counters.e2e_seconds.observe(max(0.0, now - self.pulled.submitted_at))
        if state == "succeeded" and self.pulled.promise:
            self._score_promise(counters, now)
        if state in ("cancelled", "expired"):
            counters.discarded_tokens.inc("cancelled", self.new_tokens)

    def _score_promise(self, counters: WorkerCounters, now: float) -> None:
        try:
            promised = Estimate.read(self.pulled.promise)
        except ValueError:
            return  # of another version
        after_ms = now * 1000 - promised.start
        kept: PromiseKept = (
            "p50" if after_ms <= promised.p50 else "p90" if after_ms <= promised.p90 else "late"
        )
        counters.promises.inc(kept)
        counters.promise_ratio.observe(promised.ratio(now))


def checkpoint_call(
    queue: str, job: RunningJob, now: float, hmac_keys: Keys, keys: KeyRing
) -> Call[CheckpointReply]:
    """Build the call that writes progress and the part of the checkpoint not yet stored."""

    def sign(entry: bytes) -> bytes:
        digest = digest_of(job.fingerprint)
        entry = keys.seal(entry, "delta", job.job_id)
        return hmac_keys.sign_entry(entry, queue=queue, job_id=job.job_id, fingerprint=digest)

    return transitions.checkpoint(
        queue,
        job.job_id,
        job.token,
        job.progress(now),
        job.unsaved(),
        fingerprint=job.fingerprint,
        restart=job.restart_checkpoint,
        sign=sign,
    )


def succeeded(queue: str, job: RunningJob, body: bytes) -> FinalWrite:
    """End a job with its result's JSON, `body`."""
    body = ring().seal(body, "result", job.job_id)
    return FinalWrite(
        job.pulled,
        "succeeded",
        transitions.commit(
            queue,
            job.job_id,
            job.token,
            "succeeded",
            result_json=body,
            progress=job.progress(0.0),
            used=job.used(),
        ),
        job,
        size=len(body),
        body=body,
        needs_checkpoint=job.job.stream,
        new_tokens=job.generated_tokens - job.resumed_tokens,
    )


def in_store(queue: str, write: FinalWrite, uri: str, stub: bytes) -> FinalWrite:
    """Return the end of a job whose result lies in the store: Redis gets its stub."""
    assert write.job is not None
    pulled, progress = write.pulled, write.job.progress(0.0)
    call = transitions.commit(
        queue,
        pulled.job_id,
        pulled.token,
        "succeeded",
        stub,
        progress=progress,
        stored=uri,
        used=write.job.used(),
    )
    return replace(write, call=call, stored=uri, body=b"", size=len(stub))


def unfetched(queue: str, pulled: PulledJob, error: ErrorInfo) -> FinalWrite:
    """Put a job off whose payload is out of reach."""
    delay_s = transitions.retry_delay(pulled.attempt)
    call = transitions.retry(queue, pulled.job_id, pulled.token, error, delay_s)
    return FinalWrite(pulled, "retried", call, code=error.code, reason=error.message)


def handed_back(queue: str, pulled: PulledJob) -> FinalWrite:
    """Hand a job back that never became a request."""
    return FinalWrite(pulled, "released", transitions.release(queue, pulled.job_id, pulled.token))


def failed(queue: str, pulled: PulledJob, error: ErrorInfo, job: RunningJob | None = None) -> FinalWrite:
    """End a job with its own final error. `job` is None if it never became a request."""
    body = error.model_dump_json().encode()
    return FinalWrite(
        pulled,
        "failed",
        transitions.commit(
            queue,
            pulled.job_id,
            pulled.token,
            "failed",
            error_json=body,
            progress=job.progress(0.0) if job is not None else None,
            used=job.used() if job is not None else Used(),
        ),
        job,
        size=len(body),
        needs_checkpoint=job is not None,
        new_tokens=job.generated_tokens - job.resumed_tokens if job is not None else 0,
        code=error.code,
        reason=error.message,
    )


def stopped(queue: str, job: RunningJob, ending: Ending) -> FinalWrite:
    """End a job that was cancelled, or passed its deadline or timeout; its partial output stays readable."""
    body = ErrorInfo(code=ending.code, message=ending.message).model_dump_json().encode()
    state = end_state(ending)
    return FinalWrite(
        job.pulled,
        ending.kind,
        transitions.commit(
            queue,
            job.job_id,
            job.token,
            state,
            error_json=body,
            progress=job.progress(0.0),
            used=job.used(),
        ),
        job,
        size=len(body),
        needs_checkpoint=True,
        new_tokens=job.generated_tokens - job.resumed_tokens,
        code=ending.code,
        reason=ending.message,
    )


def retried(queue: str, job: RunningJob, error: ErrorInfo) -> FinalWrite:
    delay_s = transitions.retry_delay(job.pulled.attempt)
    restart = error.code == "output_invalid"
    return FinalWrite(
        job.pulled,
        "retried",
        transitions.retry(queue, job.job_id, job.token, error, delay_s, restart=restart, used=job.used()),
        job,
        needs_checkpoint=not restart,
        new_tokens=job.generated_tokens - job.resumed_tokens,
        code=error.code,
        reason=error.message,
    )


def released(queue: str, job: RunningJob) -> FinalWrite:
    return FinalWrite(
        job.pulled,
        "released",
        transitions.release(queue, job.job_id, job.token),
        job,
        needs_checkpoint=True,
    )


def lapsed(queue: str, job: RunningJob) -> FinalWrite:
    """End a job's lease now, as if the worker's process had died."""
    held = [(job.job_id, job.token)]
    return FinalWrite(
        job.pulled,
        "lapsed",
        transitions.renew(queue, "", held, lease_ms=0),
        job,
        needs_checkpoint=True,
    )
