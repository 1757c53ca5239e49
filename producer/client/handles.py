"""Handles to a job, a batch and the dead letters. They hold an id and a Producer, so they cost nothing to keep."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pagemill.producer.client import dead_letter_flow, flows
from pagemill.producer.client.base import Driver
from pagemill.producer.client.dead_letter_flow import Replay
from pagemill.producer.wire.calls.dead_letters import DeadLetter, OpenedLetter
from pagemill.producer.wire.calls.metering.quotas import QuotaLeft
from pagemill.producer.wire.schema.outputs import (
    BatchCounts,
    BatchItem,
    JobStatus,
    Progress,
    Result,
    StreamEvent,
)
from pagemill.producer.wire.schema.promise import Promise


class JobHandle:
    """One job. Every method may raise JobNotFound and RedisUnavailable."""

    __slots__ = ("_producer", "id", "promise", "quota")

    def __init__(
        self,
        producer: Driver,
        job_id: str,
        promise: Promise | None = None,
        quota: QuotaLeft | None = None,
    ) -> None:
        self._producer = producer
        self.id = job_id
        self.promise = promise
        """When it will probably end, if its submit asked."""
        self.quota = quota
        """What its tenant had left of its quotas at the submit; None if it has none."""

    def __repr__(self) -> str:
        return f"JobHandle({self.id!r})"

    def status(self) -> JobStatus:
        """Return the job's status."""
        return self._producer.run_flow(flows.status(self._producer.queue, self.id))

    def progress(self) -> Progress:
        """Return the job's progress."""
        return self.status().progress

    def result(self, timeout: float | None = None) -> Result:
        """Wait for the result, at most `timeout` seconds (None: no limit, through reconnects).

        Raises JobFailed, JobDead, JobCancelled or JobExpired for an end without a result, ResultTimeout when
        the job has not ended in time (it goes on), ResultExpired when the result has been removed.
        """
        return self._producer.run_flow(flows.wait_result(self._producer.queue, self.id, timeout))

    def cancel(self) -> bool:
        """Cancel the job. True: it will not succeed. False: it had ended before."""
        return self._producer.run_flow(flows.cancel(self._producer.queue, self.id))

    def stream(self) -> Iterator[StreamEvent]:
        """Yield tokens as they are checkpointed, then one `end`. Late readers get a `snapshot` first."""
        return self._producer.iterate_flow(flows.stream(self._producer.queue, self.id))


class BatchHandle:
    """A batch. Every method may raise JobNotFound and RedisUnavailable."""

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
        """Yield each end as it happens (ordered: in the order of submission), until all jobs have ended.

        Never raises for a job: an item holds a result or an error. `after` is the cursor of the last item
        processed, so that another reader, or a later one, continues from there. Raises StoreError where results lie
        in a store that does not answer, or that is not configured here; ResultTimeout when jobs
        have not ended `timeout` seconds after the first was asked for; those that have are delivered first.
        """
        return self._producer.iterate_flow(
            flows.batch_results(self._producer.queue, self.id, ordered=ordered, after=after, timeout=timeout)
        )

    def ack(self, cursor: str) -> int:
        """Free the items up to this cursor on the server; returns their number. They cannot be read again."""
        return self._producer.run_flow(flows.ack_batch(self._producer.queue, self.id, cursor))

    def wait(self, timeout: float | None = None) -> BatchCounts:
        """Wait until every job has ended. Raises ResultTimeout; the batch goes on."""
        return self._producer.run_flow(flows.wait_batch(self._producer.queue, self.id, timeout))

    def cancel(self) -> int:
        """Stop every job that has not ended; returns their number."""
        return self._producer.run_flow(flows.cancel_batch(self._producer.queue, self.id))


class DeadLetters:
    """The jobs of a queue that used up their attempts, or kept killing workers. Kept for 14 days.

    Every method may raise RedisUnavailable.
    """

    __slots__ = ("_producer",)

    def __init__(self, producer: Driver) -> None:
        self._producer = producer

    def list(self, error: str | None = None) -> Iterator[DeadLetter]:
        """Yield the letters, the latest death first; `error` is a code, or a cause of used-up attempts."""
        return self._producer.iterate_flow(dead_letter_flow.letters(self._producer.queue, error))

    def show(self, job_id: str) -> OpenedLetter:
        """Return one letter with its payload and its partial output. Raises JobNotFound."""
        return self._producer.run_flow(dead_letter_flow.show(self._producer.queue, job_id))

    def replay(self, job_ids: Sequence[str] | None = None, *, error: str | None = None) -> Replay:
        """Resubmit dead jobs as new ones: the given ones, all with one error, or all.

        A letter is replayed once, however often this is called; again only if its replay was cancelled,
        expired or failed. The new job has no deadline or delay, a `ttl` starts anew. Raises QueueFull.
        """
        flow = dead_letter_flow.replay(self._producer.queue, self._producer.preparer, job_ids, error)
        return self._producer.run_flow(flow)

    def purge(
        self, job_ids: Sequence[str] | None = None, *, error: str | None = None, replayed: bool = False
    ) -> int:
        """Delete letters: the given ones, all with one error, or all; `replayed`: only replayed ones."""
        wanted = dead_letter_flow.Wanted(error, replayed)
        return self._producer.run_flow(dead_letter_flow.purge(self._producer.queue, job_ids, wanted))
