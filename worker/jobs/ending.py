"""The end of a job on this worker: its outcome, and the write that records it."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.account import write_spent
from pagemill.producer.wire.calls.metering.usage import JobUsage
from pagemill.producer.wire.calls.transitions import PulledJob, RenewReply
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.jobs.running_job import Outcome, RunningJob

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, eq=False)
class End:
    """A job's last write. It may be sent any number of times: the server applies it once."""

    pulled: PulledJob
    outcome: Outcome
    call: Call[Any]
    job: RunningJob | None
    """None if it never became a request."""
    error: ErrorInfo | None
    """Why it ended without a result. Quotes neither the prompt nor the output."""
    body: bytes
    """The result or the error, in the form that is committed."""
    stored: str
    """The URI of the result, if it is stored in the store."""
    needs_checkpoint: bool
    """The last tokens must be checkpointed first: for a partial result, the end of a stream or the next execution."""

    @property
    def job_id(self) -> str:
        return self.pulled.job_id

    @property
    def token(self) -> int:
        return self.pulled.token

    @property
    def key(self) -> str:
        return f"{self.pulled.job_id}#{self.pulled.token}"

    @property
    def new_tokens(self) -> int:
        """Tokens generated in this execution."""
        return self.job.new_tokens if self.job is not None else 0

    def name_of(self, reply: Any) -> str:
        """Return the server's verdict: a terminal state, or released, lapsed, retrying, fenced, already_done, error."""
        if isinstance(reply, Exception):
            return "error"
        if isinstance(reply, RenewReply):
            return "fenced" if reply.lost else "lapsed"
        return self.outcome.value if reply == "committed" else str(reply)


def end(
    queue: str,
    ended: RunningJob | PulledJob,
    outcome: Outcome,
    error: ErrorInfo | None = None,
    *,
    result: bytes = b"",
    stored: str = "",
    needs: Sequence[str] = (),
) -> End:
    """Build a job's last write.

    Args:
        ended: a pulled job never became a request.
        error: the error of a job without a result, or the cause of a retry.
        result: the result as committed: encrypted if keys are set; a stub if the result is `stored` at a URI.
        needs: the abilities that the worker lacks, if it requeues the job.
    """
    job, pulled = (ended, ended.pulled) if isinstance(ended, RunningJob) else (None, ended)
    held = (pulled.job_id, pulled.token)
    body = b""
    needs_checkpoint = job is not None
    spent = write_spent(job.times()) if job is not None else ""
    call: Call[Any]
    match outcome:
        case Outcome.RELEASED:
            call = transitions.release(queue, *held, needs, spent=spent)
        case Outcome.DISTRUSTED:
            needs_checkpoint = False
            call = transitions.release(queue, *held, needs, spent=spent, restart=True)
        case Outcome.LAPSED:
            call = transitions.renew(queue, "", [held], lease_ms=0)
        case Outcome.RETRIED:
            assert error is not None
            restart = error.code == "output_invalid"
            needs_checkpoint = needs_checkpoint and not restart
            delay_s = transitions.retry_delay(pulled.attempt)
            used = job.usage() if job is not None else None
            call = transitions.retry(queue, *held, error, delay_s, restart=restart, used=used, spent=spent)
        case _:
            body = result if error is None else error.model_dump_json().encode()
            if outcome is Outcome.SUCCEEDED:
                needs_checkpoint = job is not None and job.job.stream
            state: Any = outcome.value
            call = transitions.commit(
                queue,
                *held,
                state,
                result_json=body,
                error_json=body,
                progress=job.progress(0.0) if job is not None else None,
                stored=stored,
                used=job.usage() if job is not None else JobUsage(),
                spent=spent,
            )
    return End(pulled, outcome, call, job, error, body, stored, needs_checkpoint)


class JobListener:
    """Receives events of this worker's jobs after the server's reply, on the threads of admission and the reporter."""

    def received(self, pulled: PulledJob) -> None:
        """The job was pulled."""

    def started(self, job: RunningJob) -> None:
        """The engine has received the job."""

    def lost(self, job_id: str, token: int, job: RunningJob | None) -> None:
        """Another worker has the lease; `job` is None if it had not started."""

    def ended(self, end: End, reply: str, began_at: float, error: Exception | None) -> None:
        """The server has replied to the last write.

        Args:
            reply: as `End.name_of` returns it.
            began_at: when the write was sent, by the server's clock.
            error: the error with which the server rejected the write.
        """


class JobListeners(JobListener):
    """Combines several listeners. Errors of a listener are logged, and affect neither jobs nor other listeners."""

    def __init__(self, *listeners: JobListener) -> None:
        self._listeners = listeners

    def received(self, pulled: PulledJob) -> None:
        self._each(lambda listener: listener.received(pulled))

    def started(self, job: RunningJob) -> None:
        self._each(lambda listener: listener.started(job))

    def lost(self, job_id: str, token: int, job: RunningJob | None) -> None:
        self._each(lambda listener: listener.lost(job_id, token, job))

    def ended(self, end: End, reply: str, began_at: float, error: Exception | None) -> None:
        self._each(lambda listener: listener.ended(end, reply, began_at, error))

    def _each(self, tell: Callable[[JobListener], None]) -> None:
        for listener in self._listeners:
            try:
                tell(listener)
            except Exception:
                logger.exception("%s failed; its figures or lines are incomplete", type(listener).__name__)
