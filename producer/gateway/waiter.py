"""One request that waits for its jobs, counted with all others that wait for them, on whatever gateway."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence

from pagemill.producer.client import submit_flow
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.client.preparer import new_job_id
from pagemill.producer.client.tracing import publishing
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.wire.calls import waiters
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.job import Job

logger = logging.getLogger(__name__)


class Waiter:
    """Counted from the submit on. A gateway that dies leaves its waiters counted: their jobs run to their ends."""

    def __init__(self, gateway: Gateway) -> None:
        self.handles: list[AsyncJobHandle] = []
        """Its jobs, or those that have their idempotency keys."""
        self._gateway = gateway
        self._id = secrets.token_hex(6)

    async def submit(self, jobs: Iterable[Job]) -> None:
        """All of them, or the first error; then it waits for none. Raises as AsyncProducer.submit."""
        try:
            for job in jobs:
                await self._submit(job)
        except BaseException:
            self.leave(self.handles)
            raise

    def leave(self, handles: Sequence[AsyncJobHandle]) -> None:
        """Wait no longer, whatever becomes of the request meanwhile: what nobody else waits for ends."""
        if handles:
            self._gateway.in_background(self._leave([handle.id for handle in handles]))

    async def _submit(self, job: Job) -> None:
        producer = self._gateway.producer
        handle = AsyncJobHandle(producer, new_job_id())
        self.handles.append(handle)  # it may have arrived where its reply has not
        with publishing(producer.queue, job) as traceparent:
            item = producer.preparer.job(job, {}, handle.id, traceparent=traceparent, waiter=self._id)
            handle.id = await producer.run_flow(submit_flow.submit(producer.queue, item, "raise"))

    async def _leave(self, job_ids: list[str]) -> None:
        call = waiters.hang_up(self._gateway.config.queue, self._id, job_ids)
        try:
            replies = await self._gateway.run(call)
        except PagemillError as error:
            logger.warning("jobs that could not be cancelled end by their deadlines: %s: %s", job_ids, error)
        else:
            self._gateway.metrics.cancelled_jobs += sum(
                reply in ("cancelled", "requested") for reply in replies
            )
