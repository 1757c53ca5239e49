"""Handles to a job and to a batch for asyncio; the contracts are those of handles.py."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from pagemill.producer.client import dead_letter_flow, flows
from pagemill.producer.client.base import AsyncDriver
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


class AsyncJobHandle:
    """One job; like JobHandle."""

    __slots__ = ("_producer", "id", "promise", "quota")

    def __init__(
        self,
        producer: AsyncDriver,
        job_id: str,
        promise: Promise | None = None,
        quota: QuotaLeft | None = None,
    ) -> None:
        self._producer = producer
        self.id = job_id
        self.promise = promise
        self.quota = quota

    def __repr__(self) -> str:
        return f"AsyncJobHandle({self.id!r})"

    async def status(self) -> JobStatus:
        return await self._producer.run_flow(flows.status(self._producer.queue, self.id))

    async def progress(self) -> Progress:
        return (await self.status()).progress

    async def result(self, timeout: float | None = None) -> Result:
        return await self._producer.run_flow(flows.wait_result(self._producer.queue, self.id, timeout))

    async def cancel(self) -> bool:
        return await self._producer.run_flow(flows.cancel(self._producer.queue, self.id))

    def stream(self) -> AsyncIterator[StreamEvent]:
        return self._producer.iterate_flow(flows.stream(self._producer.queue, self.id))


class AsyncBatchHandle:
    """A batch; like BatchHandle."""

    __slots__ = ("_producer", "id")

    def __init__(self, producer: AsyncDriver, batch_id: str) -> None:
        self._producer = producer
        self.id = batch_id

    def __repr__(self) -> str:
        return f"AsyncBatchHandle({self.id!r})"

    async def counts(self) -> BatchCounts:
        return await self._producer.run_flow(flows.batch_counts(self._producer.queue, self.id))

    def results(
        self, ordered: bool = False, after: str | None = None, timeout: float | None = None
    ) -> AsyncIterator[BatchItem]:
        return self._producer.iterate_flow(
            flows.batch_results(self._producer.queue, self.id, ordered=ordered, after=after, timeout=timeout)
        )

    async def ack(self, cursor: str) -> int:
        return await self._producer.run_flow(flows.ack_batch(self._producer.queue, self.id, cursor))

    async def wait(self, timeout: float | None = None) -> BatchCounts:
        return await self._producer.run_flow(flows.wait_batch(self._producer.queue, self.id, timeout))

    async def cancel(self) -> int:
        return await self._producer.run_flow(flows.cancel_batch(self._producer.queue, self.id))


class AsyncDeadLetters:
    """The dead letters of a queue; like DeadLetters."""

    __slots__ = ("_producer",)

    def __init__(self, producer: AsyncDriver) -> None:
        self._producer = producer

    def list(self, error: str | None = None) -> AsyncIterator[DeadLetter]:
        return self._producer.iterate_flow(dead_letter_flow.letters(self._producer.queue, error))

    async def show(self, job_id: str) -> OpenedLetter:
        return await self._producer.run_flow(dead_letter_flow.show(self._producer.queue, job_id))

    async def replay(self, job_ids: Sequence[str] | None = None, *, error: str | None = None) -> Replay:
        flow = dead_letter_flow.replay(self._producer.queue, self._producer.preparer, job_ids, error)
        return await self._producer.run_flow(flow)

    async def purge(
        self, job_ids: Sequence[str] | None = None, *, error: str | None = None, replayed: bool = False
    ) -> int:
        wanted = dead_letter_flow.Wanted(error, replayed)
        return await self._producer.run_flow(dead_letter_flow.purge(self._producer.queue, job_ids, wanted))
