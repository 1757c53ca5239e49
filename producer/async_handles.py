"""Handles to a job and to a batch for asyncio; the contracts are those of handles.py."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from producer import flows
from producer.wire.outputs import BatchCounts, BatchItem, JobStatus, Progress, Result, StreamEvent

if TYPE_CHECKING:
    from producer.async_client import AsyncProducer


class AsyncJobHandle:
    """One job, as JobHandle."""

    __slots__ = ("_producer", "id")

    def __init__(self, producer: AsyncProducer, job_id: str) -> None:
        self._producer = producer
        self.id = job_id

    def __repr__(self) -> str:
        return f"AsyncJobHandle({self.id!r})"

    async def status(self) -> JobStatus:
        return await self._producer._run(flows.status(self._producer.queue, self.id))

    async def progress(self) -> Progress:
        return (await self.status()).progress

    async def result(self, timeout: float | None = None) -> Result:
        return await self._producer._run(flows.wait_result(self._producer.queue, self.id, timeout))

    async def cancel(self) -> bool:
        return await self._producer._run(flows.cancel(self._producer.queue, self.id))

    def stream(self) -> AsyncIterator[StreamEvent]:
        return self._producer._iterate(flows.stream(self._producer.queue, self.id))


class AsyncBatchHandle:
    """A batch, as BatchHandle."""

    __slots__ = ("_producer", "id")

    def __init__(self, producer: AsyncProducer, batch_id: str) -> None:
        self._producer = producer
        self.id = batch_id

    def __repr__(self) -> str:
        return f"AsyncBatchHandle({self.id!r})"

    async def counts(self) -> BatchCounts:
        return await self._producer._run(flows.batch_counts(self._producer.queue, self.id))

    def results(self, ordered: bool = False, after: str | None = None) -> AsyncIterator[BatchItem]:
        return self._producer._iterate(
            flows.batch_results(self._producer.queue, self.id, ordered=ordered, after=after)
        )

    async def ack(self, cursor: str) -> int:
        return await self._producer._run(flows.ack_batch(self._producer.queue, self.id, cursor))

    async def wait(self, timeout: float | None = None) -> BatchCounts:
        return await self._producer._run(flows.wait_batch(self._producer.queue, self.id, timeout))

    async def cancel(self) -> int:
        return await self._producer._run(flows.cancel_batch(self._producer.queue, self.id))
