"""A request that waits for its jobs, counted together with the waiters on all other gateways."""

from __future__ import annotations

import logging
import secrets
from collections.abc import Iterable, Sequence

from pagemill.producer.client import submit_flow
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.client.preparer import new_job_id
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.client.tracing import publishing
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.wire.calls.gateway import waiters
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.job import Job

logger = logging.getLogger(__name__)


class Waiter:
    """Counted from the submit on. If a gateway dies its waiters stay counted: their jobs run to the end."""

    def __init__(self, gateway: Gateway, caller: ApiKey, on_late: OnLate | None = None) -> None:
        """`on_late`: as AsyncProducer.submit's `promise`."""
        self.handles: list[AsyncJobHandle] = []
        """The request's jobs, or earlier ones with the same idempotency keys."""
        self._gateway = gateway
        self._caller = caller
        self._on_late = on_late
        self._id = secrets.token_hex(6)

    async def submit(self, jobs: Iterable[Job]) -> None:
        """Submit all jobs; on an error leave those submitted before. Raises as AsyncProducer.submit does."""
        try:
            for job in jobs:
                await self._submit(job)
        except BaseException:
            self.leave(self.handles)
            raise

    def headers(self) -> dict[str, str]:
        """Return the headers of an answer that say what its submit was told."""
        return self._promise_headers() | self._quota_headers()

    def _quota_headers(self) -> dict[str, str]:
        """Return what the tenant has left of its quotas, in the names that OpenAI's clients know."""
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

    def _promise_headers(self) -> dict[str, str]:
        """Return the headers of an answer that say when its last job was to end; none where that is not known."""
        promises = [handle.promise for handle in self.handles if handle.promise is not None]
        last = max(promises, key=lambda promise: promise.p50 or 0.0, default=None)
        if last is None or last.p50 is None or last.p90 is None:
            return {}
        return {"x-promised-p50": f"{last.p50:.3f}", "x-promised-p90": f"{last.p90:.3f}"}

    def leave(self, handles: Sequence[AsyncJobHandle]) -> None:
        """Stop waiting, in the background: jobs without another waiter end."""
        if handles:
            self._gateway.in_background(self._leave([handle.id for handle in handles]))

    async def _submit(self, job: Job) -> None:
        producer = self._gateway.producer
        handle = AsyncJobHandle(producer, new_job_id())
        self.handles.append(handle)  # even if the reply is lost, the submit may have arrived
        with publishing(producer.queue, job) as traceparent:
            item = producer.preparer.job(job, {}, handle.id, traceparent=traceparent, waiter=self._id)
            item = item.under(self._caller.counted_as)
            flow = submit_flow.submit_with_promise(producer.queue, item, "raise", self._on_late)
            handle.id, handle.promise, handle.quota = await producer.run_flow(flow)

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
