"""The producer for asyncio: the same names and contracts as sync.py, awaitable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from datetime import date
from types import TracebackType
from typing import Any, Self, TypeVar, Unpack

from redis.asyncio.retry import Retry
from redis.backoff import ExponentialBackoff

from pagemill.producer.client import flows, preparer, submit_flow, usage_flow
from pagemill.producer.client.aio_handles import AsyncBatchHandle, AsyncDeadLetters, AsyncJobHandle
from pagemill.producer.client.aio_listener import AsyncListener, AsyncWatched
from pagemill.producer.client.base import AsyncDriver
from pagemill.producer.client.effects import (
    Begin,
    Delete,
    Effect,
    Emit,
    Finish,
    Flow,
    Read,
    Sleep,
    Sync,
    Wait,
    Watch,
    Write,
)
from pagemill.producer.client.job_fields import JobFields
from pagemill.producer.client.preparer import JobLike, OnInvalid
from pagemill.producer.client.purge import flow as purge
from pagemill.producer.client.purge.report import PurgeOptions, PurgeProgress, PurgeReport
from pagemill.producer.client.replay import flow as replay
from pagemill.producer.client.replay.flow import Placement, ReplayOptions
from pagemill.producer.client.replay.verification import Verification
from pagemill.producer.client.rollout.handles import AsyncModelRollout
from pagemill.producer.client.submit_flow import OnFull, OnLate
from pagemill.producer.client.tracing import publishing
from pagemill.producer.wire.calls.metering.usage import GROUPS, UsageFilter, UsageRow
from pagemill.producer.wire.schema.outputs import BatchInfo, JobStatus
from pagemill.producer.wire.server.clients import open_async_client
from pagemill.producer.wire.server.discovery import find_redis
from pagemill.producer.wire.server.transport import AsyncTransport

T = TypeVar("T")

MAX_CONNECTIONS = 32
"""Connections that concurrent calls share; thousands of tasks may call at once."""


class AsyncProducer(AsyncDriver):
    """Producer for one event loop: use it on the loop that first used it.

    async with AsyncProducer() as producer:
        handle = await producer.submit(prompt="The capital of France is", model="smollm2")
        print((await handle.result(timeout=60)).text)
    """

    def _init_connection(self) -> None:
        self._connection: _Connection | None = None

    async def submit(
        self,
        job: JobLike | None = None,
        /,
        *,
        job_id: str | None = None,
        on_full: OnFull = "raise",
        promise: OnLate | None = None,
        **fields: Unpack[JobFields],
    ) -> AsyncJobHandle:
        """Like Producer.submit."""
        chosen = preparer.new_job_id() if job_id is None else preparer.check_id(job_id)
        if self.preparer.lacks_model(job, fields):
            fields["model"] = await self.run_flow(flows.served_model(self.queue))
        with publishing(self.queue, job, fields) as traceparent:
            item = self.preparer.job(job, fields, chosen, traceparent=traceparent)
            flow = submit_flow.submit_with_promise(self.queue, item, on_full, promise)
            return AsyncJobHandle(self, *(await self.run_flow(flow)))

    async def submit_many(
        self,
        jobs: Iterable[JobLike],
        *,
        batch_id: str | None = None,
        on_invalid: OnInvalid = "record",
        on_full: OnFull = "block",
    ) -> AsyncBatchHandle:
        """Like Producer.submit_many."""
        chosen = preparer.new_batch_id() if batch_id is None else preparer.check_id(batch_id)
        jobs, first = preparer.peeked(jobs)
        model = (
            await self.run_flow(flows.served_model(self.queue)) if self.preparer.lacks_model(first) else None
        )
        with publishing(self.queue) as traceparent:
            items = self.preparer.items(
                jobs,
                chosen,
                on_invalid=on_invalid,
                by_content=batch_id is not None,
                traceparent=traceparent,
                model=model,
            )
            await self.run_flow(submit_flow.submit_many(self.queue, chosen, items, on_full, on_invalid))
        return AsyncBatchHandle(self, chosen)

    def job(self, job_id: str) -> AsyncJobHandle:
        """Like Producer.job."""
        return AsyncJobHandle(self, preparer.check_id(job_id))

    def batch(self, batch_id: str) -> AsyncBatchHandle:
        """Like Producer.batch."""
        return AsyncBatchHandle(self, preparer.check_id(batch_id))

    def batches(self) -> AsyncIterator[BatchInfo]:
        """Like Producer.batches."""
        return self.iterate_flow(flows.batch_infos(self.queue))

    async def statuses(self, job_ids: Sequence[str]) -> list[JobStatus]:
        """Like Producer.statuses."""
        return await self.run_flow(flows.statuses(self.queue, job_ids))

    async def usage(
        self,
        *,
        since: date | None = None,
        until: date | None = None,
        tenant: str | None = None,
        model: str | None = None,
        by: Sequence[str] = GROUPS,
    ) -> list[UsageRow]:
        """Like Producer.usage."""
        wanted = UsageFilter(since, until, tenant, model, tuple(by))
        return await self.run_flow(usage_flow.usage(self.queue, wanted))

    def dead_letters(self) -> AsyncDeadLetters:
        """Like Producer.dead_letters."""
        return AsyncDeadLetters(self)

    async def verify(
        self, job_id: str, *, timeout: float | None = None, **options: Unpack[Placement]
    ) -> Verification:
        """Like Producer.verify."""
        chosen = ReplayOptions(timeout=timeout, **options)
        return await self.run_flow(
            replay.verify(self.queue, self.preparer, preparer.check_id(job_id), chosen)
        )

    def verify_batch(
        self,
        batch_id: str,
        sample: int = 50,
        *,
        timeout: float | None = None,
        **options: Unpack[Placement],
    ) -> AsyncIterator[Verification]:
        """Like Producer.verify_batch."""
        chosen = ReplayOptions(timeout=timeout, **options)
        flow = replay.verify_batch(self.queue, self.preparer, preparer.check_id(batch_id), sample, chosen)
        return self.iterate_flow(flow)

    def rollout(self, model: str) -> AsyncModelRollout:
        """Like Producer.rollout."""
        return AsyncModelRollout(self, model)

    async def purge_tenant(
        self,
        tenant: str,
        options: PurgeOptions | None = None,
        *,
        on_progress: Callable[[PurgeProgress], None] = lambda progress: None,
    ) -> PurgeReport:
        """Like Producer.purge_tenant."""
        flow = purge.purge_tenant(
            self.queue, tenant, options or PurgeOptions(), has_store=self.store is not None
        )
        async for item in self.iterate_flow(flow):
            if isinstance(item, PurgeReport):
                return item
            on_progress(item)
        raise AssertionError("a purge ends with its report")

    async def close(self) -> None:
        """Close the connections. Later use opens new ones."""
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def run_flow(self, flow: Flow[T]) -> T:
        """Drive a flow that emits nothing, and return its value."""
        self._connected()  # outside the loop: not finding a server is an error at once, not retried
        try:
            effect = next(flow)
            while True:
                try:
                    value = await self._perform_cancellably(effect, {})
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except StopIteration as end:
            result: T = end.value
            return result
        finally:
            flow.close()

    async def iterate_flow(self, flow: Flow[None]) -> AsyncIterator[Any]:
        """Drive a flow, yielding its items as they are requested."""
        watches: dict[str, AsyncWatched] = {}
        try:
            effect = next(flow)
            while True:
                if isinstance(effect, Emit):
                    yield effect.item
                    effect = next(flow)
                    continue
                try:
                    value = await self._perform_cancellably(effect, watches)
                except Exception as error:
                    effect = flow.throw(error)
                else:
                    effect = flow.send(value)
        except StopIteration:
            return
        finally:
            flow.close()
            for watched in watches.values():
                watched.close()

    async def _perform_cancellably(self, effect: Effect, watches: dict[str, AsyncWatched]) -> Any:
        """Perform an effect without losing a cancellation that arrives meanwhile.

        The driver sends under `asyncio.wait_for`, which in Python 3.11 swallows a cancellation that coincides
        with the end of the awaited call.
        """
        task = asyncio.current_task()
        assert task is not None
        before = task.cancelling()
        value = await self._perform(effect, watches)
        if task.cancelling() > before:
            raise asyncio.CancelledError
        return value

    async def _perform(self, effect: Effect, watches: dict[str, AsyncWatched]) -> Any:
        match effect:
            case Begin(call):
                sending = asyncio.ensure_future(self._connected().transport.run_alone(call))
                await asyncio.sleep(0)  # lets it be sent before the next chunk is prepared
                return sending
            case Finish(pending):
                return await pending
            case Sync():
                if self._durability == "fsync":
                    await self._connected().transport.sync(self.queue)
            case Write(uploads):
                await asyncio.to_thread(self.write_stored, uploads)
            case Read(reference):
                return await asyncio.to_thread(self.read_stored, reference)
            case Delete(uris):
                await asyncio.to_thread(self.delete_stored, uris)
            case Sleep(seconds):
                await asyncio.sleep(seconds)
            case Watch(topic):
                watches[topic] = self._connected().listener.watch(topic)
            case Wait(topic, timeout) if topic in watches:
                await watches[topic].wait(timeout)
            case Wait(topic, timeout, polled):
                await self._connected().listener.wait(topic, timeout, polled=polled)
            case Emit():
                raise AssertionError("a flow that emits was run for its value")
            case call:
                return await self._connected().transport.run(call)
        return None

    def _connected(self) -> _Connection:
        if self._connection is None:
            self._connection = _Connection(find_redis(self._url), self.queue)
        return self._connection


class _Connection:
    """A client, its transport and a listener."""

    def __init__(self, url: str, queue: str) -> None:
        retry = Retry(ExponentialBackoff(cap=0.5, base=0.05), retries=2)
        client = open_async_client(url, queue, max_connections=MAX_CONNECTIONS, retry=retry)
        self.transport = AsyncTransport(client)
        self.listener = AsyncListener(self.transport, queue)

    async def close(self) -> None:
        await self.listener.close()
        await self.transport.close()
