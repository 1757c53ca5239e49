"""Handles to a job, a batch and the dead letters. They only hold an id and a Producer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagemill.producer.client import dead_letter_flow, flows
from pagemill.producer.client.base import Driver
from pagemill.producer.client.dead_letter_flow import Replay
from pagemill.producer.wire.calls.account import JobAccount
from pagemill.producer.wire.calls.dead_letters import DeadLetter, OpenedLetter
from pagemill.producer.wire.calls.metering.quotas import TenantQuotas
from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
from pagemill.producer.wire.schema.outputs import (
    BatchCounts,
    BatchItem,
    JobStatus,
    Progress,
    Result,
    StreamEvent,
)


class JobHandle:
    """Handle to one job. Every method may raise JobNotFound and RedisUnavailable."""

    __slots__ = ("_producer", "estimate", "id", "quota")

    def __init__(
        self,
        producer: Driver,
        job_id: str,
        estimate: CompletionEstimate | None = None,
        quota: TenantQuotas | None = None,
    ) -> None:
        self._producer = producer
        self.id = job_id
        self.estimate = estimate
        """The estimate of its end, if its submission requested one."""
        self.quota = quota
        """The remaining quotas of its tenant at submission; None if it has none."""

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def status(self) -> JobStatus:
        """Return the job's status."""
        return self._producer.run_flow(flows.status(self._producer.queue, self.id))

    def progress(self) -> Progress:
        """Return the job's progress."""
        return self.status().progress

    def why(self) -> JobAccount:
        """Return an account of the job's time: causes that sum to its lifetime so far."""
        return self._producer.run_flow(flows.why(self._producer.queue, self.id))

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, also through reconnects.

        Args:
            timeout: seconds to wait; None: no limit.

        Returns:
            The result of the job.

        Raises:
            JobFailed: the job ended with its own error.
            JobDead: the job used up its attempts or crashed its workers.
            JobCancelled: the job was cancelled.
            JobExpired: the deadline passed.
            ResultTimeout: the job has not ended in time; it continues.
            ResultExpired: the result was deleted at the end of its lifetime.
        """
        return self._producer.run_flow(flows.wait_result(self._producer.queue, self.id, timeout))

    def cancel(self) -> bool:
        """Cancel the job. Return False if it had ended before."""
        return self._producer.run_flow(flows.cancel(self._producer.queue, self.id))

    def stream(self) -> Iterator[StreamEvent]:
        """Yield tokens as they are checkpointed, then one `end`. Late readers get a `snapshot` first."""
        return self._producer.iterate_flow(flows.stream(self._producer.queue, self.id))


class BatchHandle:
    """Handle to a batch. Every method may raise JobNotFound and RedisUnavailable."""

    __slots__ = ("_producer", "id")

    def __init__(self, producer: Driver, batch_id: str) -> None:
        self._producer = producer
        self.id = batch_id

    def __repr__(self) -> str:
        return f"BatchHandle({self.id!r})"

    def counts(self) -> BatchCounts:
        """Return the numbers of jobs by state; they sum to the total."""
        return self._producer.run_flow(flows.batch_counts(self._producer.queue, self.id))

    def results(
        self, ordered: bool = False, after: str | None = None, timeout: float | None = None
    ) -> Iterator[BatchItem]:
        """Yield the end of each job until all have ended. A failed job is an item, not an exception.

        Args:
            ordered: in the order of submission instead of the order of ends.
            after: cursor of the last item that was processed; another reader, or a later one, continues there.
            timeout: seconds, counted from the first item that is requested; None: no limit.

        Yields:
            One item per job, with a result or an error.

        Raises:
            ResultTimeout: jobs have not ended in time; those that have are delivered first.
            StoreError: a result is in a store that does not respond or is not configured here.
        """
        return self._producer.iterate_flow(
            flows.batch_results(self._producer.queue, self.id, ordered=ordered, after=after, timeout=timeout)
        )

    def ack(self, cursor: str) -> int:
        """Free the items up to a cursor on the server. They cannot be read again.

        Args:
            cursor: `cursor` of the last item that was processed.

        Returns:
            The number of items that were freed.
        """
        return self._producer.run_flow(flows.ack_batch(self._producer.queue, self.id, cursor))

    def wait(self, timeout: float | None = None) -> BatchCounts:
        """Wait until every job has ended.

        Args:
            timeout: seconds to wait; None: no limit.

        Returns:
            The numbers of jobs by state.

        Raises:
            ResultTimeout: jobs have not ended in time; the batch continues.
        """
        return self._producer.run_flow(flows.wait_batch(self._producer.queue, self.id, timeout))

    def cancel(self) -> int:
        """Cancel every job that has not ended, and return their number."""
        return self._producer.run_flow(flows.cancel_batch(self._producer.queue, self.id))


class DeadLetters:
    """Dead-letter queue: jobs that used up their attempts or crashed their workers. Letters are kept for 14 days.

    Every method may raise RedisUnavailable.
    """

    __slots__ = ("_producer",)

    def __init__(self, producer: Driver) -> None:
        self._producer = producer

    def list(self, error: str | None = None) -> Iterator[DeadLetter]:
        """Yield dead letters, the latest first.

        Args:
            error: only letters with this error code, or this cause of used-up attempts; None: all.

        Yields:
            Dead letters without payloads.
        """
        return self._producer.iterate_flow(dead_letter_flow.letters(self._producer.queue, error))

    def show(self, job_id: str) -> OpenedLetter:
        """Return one dead letter.

        Args:
            job_id: the dead job's id.

        Returns:
            The letter with its payload and its partial output.

        Raises:
            JobNotFound: the job is not in the dead-letter queue.
        """
        return self._producer.run_flow(dead_letter_flow.show(self._producer.queue, job_id))

    def replay(self, job_ids: Sequence[str] | None = None, *, error: str | None = None) -> Replay:
        """Resubmit dead jobs as new ones.

        A letter is replayed once; again only if its replay was cancelled, expired or failed. The new job has no
        deadline or delay; a `ttl` starts again.

        Args:
            job_ids: the dead jobs' ids; None: all.
            error: only letters with this error code or cause.

        Returns:
            The new ids, and the jobs that were not replayed.

        Raises:
            QueueFull: the queue accepts no more jobs.
        """
        flow = dead_letter_flow.replay(self._producer.queue, self._producer.preparer, job_ids, error)
        return self._producer.run_flow(flow)

    def purge(
        self, job_ids: Sequence[str] | None = None, *, error: str | None = None, replayed: bool = False
    ) -> int:
        """Delete dead letters.

        Args:
            job_ids: the dead jobs' ids; None: all.
            error: only letters with this error code or cause.
            replayed: only letters that were replayed.

        Returns:
            The number of deleted letters.
        """
        wanted = dead_letter_flow.LetterFilter(error, replayed)
        return self._producer.run_flow(dead_letter_flow.purge(self._producer.queue, job_ids, wanted))
