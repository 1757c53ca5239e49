"""The exceptions of producers, the queue and workers.

PagemillError
├── InvalidJob             the job is invalid, or requests something unsupported (also a ValueError)
├── InvalidOutput          the output cannot be parsed as requested (also a ValueError)
├── QueueFull              the queue's limit or the server's memory is reached
├── DeadlineUnreachable    it would probably expire, so it was not submitted
├── IdempotencyConflict    the idempotency key belongs to a job with another payload
├── RedisUnavailable       no server, or the call's outcome is unknown: retry with the same id
├── InvalidAddress         the server's address is invalid (also a ValueError)
├── RedisRefused           the server rejects a valid call, which had no effect
├── AccessDenied           the server's user lacks a right; the call had no effect
├── ResultTimeout          the wait ended, the job continues (also a TimeoutError)
├── JobNotFound            no such job, or its record has been removed
├── ResultExpired          the job ended, its result has been removed
├── StoreError             a payload or result outside Redis can't be read or written
├── Unverifiable           a job can't be replayed, or its replay is inconclusive
└── JobError               the job ended without a result
    ├── JobFailed          final error of the job itself
    ├── JobDead            retryable errors or crashes used up its attempts
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
"""The start of the message of a job that exceeded its own `timeout`, not its deadline."""


class InvalidJob(PagemillError, ValueError):
    """The job was rejected. `code` is one of `FINAL_CODES`. The message never quotes the prompt.

    `param` names the offending field, if there is one.
    """

    def __init__(self, message: str, code: str = "invalid_job", param: str | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.param = param


class QueueFull(PagemillError):
    """The queue does not accept more jobs now.

    `reason`: jobs, the maximum number is waiting; memory, the server's memory is used up, which is checked
    every second. `limit` jobs may wait in `queue`, and `depth` do; `lane` is the rejected job's (priority,
    tenant, model). Limit and depth are None if the reason is memory.
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
    """The job would probably expire, so it was not submitted. `estimate` contains its estimated end."""

    def __init__(self, message: str, estimate: CompletionEstimate) -> None:
        super().__init__(message)
        self.estimate = estimate


class IdempotencyConflict(PagemillError):
    """The idempotency key belongs to `job_id`, whose payload differs."""

    def __init__(self, message: str, job_id: str) -> None:
        super().__init__(message)
        self.job_id = job_id


class RedisUnavailable(PagemillError):
    """The server did not answer. After a submission the outcome is unknown.

    `job_id` names the job that was being submitted: `submit(..., job_id=error.job_id)` is safe, whether or
    not the first attempt arrived.
    """

    def __init__(self, message: str, job_id: str | None = None) -> None:
        super().__init__(message)
        self.job_id = job_id


class AccessDenied(PagemillError):
    """The server's user lacks the right for a call. docs/security.md lists the required rights."""


class InvalidAddress(PagemillError, ValueError):
    """The server's address is invalid: its form, or the database it names. The message never contains it."""


class RedisRefused(PagemillError):
    """The server rejects a call that it should accept: foreign keys, an unsupported version, a bug.

    The call had no effect, and a retry will not help.
    """


class ResultTimeout(PagemillError, TimeoutError):
    """The wait ended before the job did. The job continues. `reason` is the cause of its delay, if known."""

    def __init__(self, message: str, reason: str | None = None) -> None:
        super().__init__(message)
        self.reason = reason


class JobNotFound(PagemillError, LookupError):
    """The job is unknown to the queue: never submitted, removed after its time to live, or acknowledged."""

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
    """A payload or result in a store cannot be read or written. The message contains neither names nor credentials.

    `kind`: lost, it is missing or changed; away, the store does not answer, but may later (`retryable`);
    unset, no store is configured here, or a different one.
    """

    def __init__(self, message: str, kind: Literal["lost", "away", "unset"] = "lost") -> None:
        super().__init__(message)
        self.kind = kind

    @property
    def retryable(self) -> bool:
        """True if the store was unavailable."""
        return self.kind == "away"


class Unverifiable(PagemillError):
    """`verify` reached no verdict: nothing to compare, no input, no suitable worker, a copy that failed."""


class RolloutRefused(PagemillError):
    """The rollout cannot be changed: there is none, another one is active, or no worker has the revision."""


class JobError(PagemillError):
    """The job ended without a result.

    `code` is the cause, `retryable` whether another submission may succeed, `partial` the partial output.
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
    """The job ended with its own final error: running it again has the same outcome."""

    state = "failed"


class JobDead(JobError):
    """The job used up its attempts, or crashed its workers. It is a dead letter, and can be replayed."""

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
"""Maps terminal states to their errors."""
