"""A request that waits for its jobs, counted together with the waiters of all other gateways."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Iterable, Sequence

from pagemill.producer.client import submit_flow
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.client.preparer import new_job_id
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.client.tracing import publishing
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.errors import wait_headers
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.request_parsing import STORED_CHAT
from pagemill.producer.gateway.webhooks import relay_of
from pagemill.producer.wire.calls.gateway import waiters
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.job import Job

logger = logging.getLogger(__name__)


class Waiter:
    """Counted from the submission on. If a gateway crashes, its waiters stay counted: their jobs run to the end."""

    def __init__(
        self, gateway: Gateway, caller: ApiKey, on_late: OnLate | None = None, *, is_counted: bool = True
    ) -> None:
        """Create a waiter for one request.

        Args:
            on_late: as AsyncProducer.submit's `estimate`.
            is_counted: False: the jobs do not end when their waiters leave.
        """
        self.handles: list[AsyncJobHandle] = []
        """The request's jobs, or earlier ones with the same idempotency keys."""
        self._gateway = gateway
        self._caller = caller
        self._on_late = on_late
        self._id = secrets.token_hex(6) if is_counted else None
        self._wait_s: float | None = None
        """The longest expected wait of a job."""
        self._sending: asyncio.Task[None] | None = None
        """The latest submission. It continues if the request that waits for it ends."""

    async def submit(self, jobs: Iterable[Job]) -> None:
        """Submit all jobs; on an error leave those submitted before. Raises as AsyncProducer.submit does."""
        try:
            for job in jobs:
                await self._submit(job)
        except BaseException:
            self.leave(self.handles)
            raise

    def headers(self) -> dict[str, str]:
        """Return the headers of a response with the estimates of its jobs, and the remaining quotas."""
        return wait_headers(self._wait_s) | self._estimate_headers() | self._quota_headers()

    def _quota_headers(self) -> dict[str, str]:
        """Return the tenant's remaining quotas under the names that OpenAI's clients know."""
        found = self.handles[-1].quota if self.handles else None
        if found is None:
            return {}
        headers = {}
        for name, left in (("requests", found.jobs), ("tokens", found.tokens)):
            if left is not None:
                headers[f"x-ratelimit-limit-{name}"] = str(left.limit)
                headers[f"x-ratelimit-remaining-{name}"] = str(left.remaining)
                headers[f"x-ratelimit-reset-{name}"] = f"{left.reset_s:.3f}s"
        return headers

    def _estimate_headers(self) -> dict[str, str]:
        """Return headers with the estimated end of the last job; none unless requested and known."""
        estimates = [handle.estimate for handle in self.handles if handle.estimate and self._on_late]
        last = max(estimates, key=lambda estimate: estimate.p50 or 0.0, default=None)
        if last is None or last.p50 is None or last.p90 is None:
            return {}
        return {"x-estimated-p50": f"{last.p50:.3f}", "x-estimated-p90": f"{last.p90:.3f}"}

    def leave(self, handles: Sequence[AsyncJobHandle]) -> None:
        """Stop waiting, in the background: jobs without another waiter end."""
        if handles and self._id is not None:
            self._gateway.in_background(self._leave(list(handles)))

    async def _submit(self, job: Job) -> None:
        producer = self._gateway.producer
        handle = AsyncJobHandle(producer, new_job_id())
        relay = await relay_of(self._gateway, job.tenant) if self._id is None else None
        with publishing(producer.queue, job) as traceparent:
            item = producer.preparer.job(
                job,
                {},
                handle.id,
                traceparent=traceparent,
                waiter=self._id,
                relay=relay,
            )
            if STORED_CHAT in (job.metadata or {}):
                item = item.listed()
            item, estimate = await self._gateway.load.expect(
                job, item.under(self._caller.counted_as), self._on_late, has_client=self._id is not None
            )
            if estimate.wait_s is not None:
                self._wait_s = max(self._wait_s or 0.0, estimate.wait_s)
            self.handles.append(handle)  # even if the reply is lost, the job may have been submitted
            flow = submit_flow.submit(producer.queue, item, "raise")

            async def send() -> None:
                reply = await producer.run_flow(flow)
                # Another id is that of an earlier job with the same idempotency key.
                handle.estimate = estimate if reply.job_id == handle.id else None
                handle.id, handle.quota = reply.job_id, reply.left

            self._sending = asyncio.create_task(send())
            if item.upload is not None:
                await asyncio.shield(self._sending)  # a store has its own timeout
                return
            async with bounded_answer():
                await asyncio.shield(self._sending)

    async def _leave(self, handles: Sequence[AsyncJobHandle]) -> None:
        assert self._id is not None
        if self._sending is not None:
            # After the submission, which continues: an earlier disconnection would not find the job.
            await asyncio.gather(self._sending, return_exceptions=True)
        job_ids = [handle.id for handle in handles]
        call = waiters.hang_up(self._gateway.config.queue, self._id, job_ids)
        try:
            replies = await self._gateway.run(call)
        except PagemillError as error:
            logger.warning("jobs that could not be cancelled end by their deadlines: %s: %s", job_ids, error)
        else:
            self._gateway.metrics.cancelled_jobs += sum(
                reply in ("cancelled", "requested") for reply in replies
            )
