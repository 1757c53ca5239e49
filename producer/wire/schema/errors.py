"""The exceptions of producers, the queue and workers.

PagemillError
├── InvalidJob             the job is invalid, or asks for something unsupported (also a ValueError)
├── InvalidOutput          the output is not what it was to be parsed as (also a ValueError)
├── QueueFull              the queue's limit or the server's memory is reached
├── DeadlineUnreachable    it would probably be expired, and was not to be submitted then
├── IdempotencyConflict    the idempotency key belongs to a job with another payload
├── RedisUnavailable       no server, or the call's outcome is unknown: retry with the same id
├── InvalidAddress         the server's address is invalid (also a ValueError)
├── RedisRefused           the server gives an answer that it should not: nothing has happened
├── AccessDenied           the server's user lacks the right: nothing has happened
├── ResultTimeout          the wait ended, the job continues (also a TimeoutError)
├── JobNotFound            no such job, or its record has been removed
├── ResultExpired          the job ended, its result has been removed
├── StoreError             a payload or result that lies outside Redis can't be read or written
├── Unverifiable           a job can't be replayed, or its replay is inconclusive
└── JobError               the job ended without a result
    ├── JobFailed          final error of the job itself
    ├── JobDead            retryable errors or crashes used up its cap
    ├── JobCancelled       it was cancelled
    └── JobExpired         its deadline passed
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Self

from pagemill.producer.wire.schema.base_error import InvalidOutput as InvalidOutput
from pagemill.producer.wire.schema.base_error import PagemillError as PagemillError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
    from pagemill.producer.wire.schema.outputs import Output


TIMED_OUT = "ran longer than its timeout"
"""How the message of a job begins that its own `timeout` ended, not its deadline."""


class InvalidJob(PagemillError, ValueError):
    """The job was refused. `code` is one of `FINAL_CODES`. The message never quotes the prompt.

    `param` names the offending field, if there is one.
    """

    def __init__(self, message: str, code: str = "invalid_job", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class QueueFull(PagemillError):
    """The queue takes no more jobs now.

    `reason`: jobs, as many wait as may; memory, the server has no room for more, which is seen again every second.
    `limit` jobs may wait in `queue`, and `depth` do; `lane` is the refused job's (priority, tenant, model). Limit and
    depth are None where the reason is memory.
    """

    def __init__(
        self,
        message: str,
        *,
        queue: str | None = None,
        limit: int | None = None,
        depth: int | None = None,
        lane: tuple[str, str, str] | None = None,
        reason: Literal["jobs", "memory"] = "jobs",
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.queue = queue
        self.limit = limit
        self.depth = depth
        self.lane = lane


class DeadlineUnreachable(PagemillError):
    """The job would more probably than not be expired, so it was not submitted. `estimate` says when it would end."""

    def __init__(self, message: str, estimate: CompletionEstimate) -> None:
        super().__init__(message)
        self.estimate = estimate


class IdempotencyConflict(PagemillError):
    """The idempotency key is taken by `job_id`, whose payload differs."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class RedisUnavailable(PagemillError):
    """The server did not answer. After a submit the outcome is unknown.

    `job_id` names the job that was being submitted: `submit(..., job_id=error.job_id)` is safe, whether
    or not the first try arrived.
    """

    def __init__(self, message: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class AccessDenied(PagemillError):
    """The server's user lacks the right for a call. docs/security.md lists the rights that are needed."""


class InvalidAddress(PagemillError, ValueError):
    """The server's address is invalid: its form, or the database it names. The message never quotes it."""


class RedisRefused(PagemillError):
    """The server refuses a call that it should accept: foreign keys, an unsupported version, a bug.

    Nothing has happened, and a retry will not help.
    """


class ResultTimeout(PagemillError, TimeoutError):
    """The wait ended before the job did. The job continues. `reason` says what it waits for, if that is known."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class JobNotFound(PagemillError, LookupError):
    """The queue knows no such job: never submitted, removed after its time to live, or acknowledged."""

    @classmethod
    def for_job(cls, job_id: str) -> Self:
        """Return the error for a job.

        Args:
            job_id: the job's id.

        Returns:
            The error with its message.
        """
        return cls(f"no job {job_id}: never submitted, or its record has been removed")


class ResultExpired(PagemillError):
    """The job succeeded, but its result has been removed after its time to live: submit the job again."""


class StoreError(PagemillError):
    """A payload or result in a store can't be read or written. The message quotes neither names nor credentials.

    `kind`: lost, it is missing or not what was written; away, the store does not answer, and may later (`retryable`);
    unset, no store is configured here, or another one.
    """

    def __init__(self, message: str, kind: Literal["lost", "away", "unset"] = "lost") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def retryable(self) -> bool:
        """True if the store was unavailable."""
        return self.kind == "away"


class Unverifiable(PagemillError):
    """`verify` reached no verdict: nothing to compare, no input, no worker of its kind, a copy that failed."""


class RolloutRefused(PagemillError):
    """The rollout can't be changed as asked: there is none, another one is on, or no worker has the revision."""


class JobError(PagemillError):
    """The job ended without a result.

    `code` says why, `retryable` whether another submit may succeed, `partial` holds what had been generated.
    """

    state = ""

    def __init__(
        self, message: str, code: str = "", retryable: bool = False, partial: Sequence[Output] = ()
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.retryable = retryable
        self.partial = tuple(partial)


class JobFailed(JobError):
    """The job ended with a final error of its own: running it again gives the same."""

    state = "failed"


class JobDead(JobError):
    """The job used up its attempts, or its workers died; it is a dead letter, and can be replayed."""

    state = "dead"


class JobCancelled(JobError):
    """The job was cancelled."""

    state = "cancelled"


class JobExpired(JobError):
    """The job's deadline passed, or it ran longer than its timeout."""

    state = "expired"


JOB_ERRORS: dict[str, type[JobError]] = {
    error.state: error for error in (JobFailed, JobDead, JobCancelled, JobExpired)
}
"""Terminal state -> the error that stands for it."""
