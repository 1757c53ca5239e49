"""The expected wait of a request, and whether to reject it for now."""

from __future__ import annotations

import json
import time
from dataclasses import replace

from pagemill.producer.client import flows, submit_flow
from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.errors import retry_later, wait_headers
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.wire.calls.estimates import EstimateInputs, estimate_inputs
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
from pagemill.producer.wire.schema.errors import DeadlineUnreachable
from pagemill.producer.wire.schema.job import Job

FRESH_S = 0.5
MAX_LANES = 256


class LoadSignals:
    """The expected waits in the queue's lanes, read at most once per `FRESH_S` and lane."""

    def __init__(self, producer: AsyncProducer, metrics: GatewayMetrics) -> None:
        self._producer = producer
        self._metrics = metrics
        self.lanes: dict[str, tuple[float, EstimateInputs]] = {}
        """Maps a lane to the time of reading (monotonic) and the reply. Beyond `MAX_LANES` the oldest are dropped."""

    async def expect(
        self, job: Job, item: Submission, on_late: OnLate | None, *, has_client: bool
    ) -> tuple[Submission, CompletionEstimate]:
        """Return the job with its estimate in its header.

        A job with an idempotency key is not rejected for the load: it may have been submitted before.

        Args:
            on_late: As AsyncProducer.submit's `estimate`; None: reject it if it would start after its deadline.
            has_client: A client waits for it; otherwise it may wait for its tenant's quota.

        Raises ApiError (429), DeadlineUnreachable and RedisUnavailable.
        """
        seen = await self._inputs(json.loads(item.header)["lane"])
        item, estimate = submit_flow.with_estimate(item, seen)
        if on_late == "refuse" and estimate.misses_deadline:
            self._metrics.refused["late"] += 1
            submit_flow.refuse_late(estimate)
        if job.idempotency_key is not None:
            return item, estimate
        pause_s = seen.left.pause_s(job.cost_tokens()) if has_client and seen.left is not None else 0.0
        if pause_s:
            self._metrics.refused["quota"] += 1
            error = retry_later(429, "the tenant's quota is used up", "quota_exceeded", pause_s)
            error.headers = dict(error.headers) | wait_headers(estimate.wait_s)
            raise error
        if on_late is None and estimate.misses_start(seen.now / 1000):
            self._metrics.refused["late"] += 1
            raise DeadlineUnreachable("the job would probably wait until its deadline", estimate)
        return item, estimate

    async def _inputs(self, lane: str) -> EstimateInputs:
        now = time.monotonic()
        at, seen = self.lanes.get(lane, (-FRESH_S, None))
        if seen is None or now >= at + FRESH_S:
            async with bounded_answer():
                seen = await self._producer.run_flow(flows.call(estimate_inputs(self._producer.queue, lane)))
            self.lanes.pop(lane, None)
            self.lanes[lane] = (now, seen)
            while len(self.lanes) > MAX_LANES:
                del self.lanes[next(iter(self.lanes))]
            return seen
        return replace(seen, now=seen.now + round(1000 * (now - at)))
