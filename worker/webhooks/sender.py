"""Delivers webhooks from the outbox, on its own threads and connection, so that no commit waits for it."""

from __future__ import annotations

import json
import logging
import random
import ssl
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pagemill.common.backoff import Backoff
from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.webhooks.delivery import TIMEOUT_S, DeliveryFailed, deliver
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy
from pagemill.worker.background import BackgroundThread
from pagemill.worker.job_queue import JobQueue

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

LOOK_S = 0.5
AT_ONCE = 8
CLAIM_S = 4 * TIMEOUT_S
"""Longer than a delivery can take: resolving, connecting, sending, waiting for the answer."""
MAX_TRIES = 12
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 3600.0


class WebhookSender(BackgroundThread):
    def __init__(
        self,
        queue: JobQueue,
        policy: WebhookPolicy,
        secrets: Sequence[bytes],
        counters: WorkerCounters,
        *,
        ca_file: Path | None = None,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`secrets`: the signing keys, the current one first. `ca_file`: replaces the system's CAs."""
        super().__init__("pagemill-webhooks")
        self._queue = queue
        self._policy = policy
        self._secrets = tuple(secrets)
        self._counters = counters
        self._first_retry_s = first_retry_s
        self._tls = ssl.create_default_context(cafile=ca_file)

    def _run(self) -> None:
        backoff = Backoff()
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pagemill-webhook")
        while not self._stop.is_set():
            try:
                notices = self._queue.run(outbox.claim(self._queue.queue, AT_ONCE, round(CLAIM_S * 1000)))
                for notice, again_ms in zip(notices, pool.map(self._try, notices), strict=True):
                    self._queue.run(
                        outbox.finish_delivery(
                            self._queue.queue, notice.outcome.job_id, notice.tries, again_ms
                        )
                    )
                backoff.reset()
                self._stop.wait(0.0 if len(notices) == AT_ONCE else LOOK_S)
            except RedisUnavailable:
                self._stop.wait(backoff.next())
            except Exception:
                logger.exception("delivering webhooks failed; continuing")
                self._stop.wait(LOOK_S)
        pool.shutdown(wait=False, cancel_futures=True)

    def _try(self, notice: Notice) -> int | None:
        """Attempt one delivery. Returns the milliseconds until the next attempt, or None if there is none."""
        job_id = notice.outcome.job_id
        try:
            target = self._policy.resolve(notice.url)
            event_id = f"{job_id}-superseded" if notice.outcome.is_superseded else job_id
            deliver(target, event_id, body_of(self._queue.queue, notice), self._secrets, self._tls)
        except Refused as refusal:
            self._counters.webhooks.inc("refused")
            logger.warning("job %s: its webhook is not called: %s", job_id, refusal)
            return None
        except (DeliveryFailed, Unresolved) as failure:
            return self._again(job_id, notice.tries, failure)
        self._counters.webhooks.inc("delivered")
        return None

    def _again(self, job_id: str, tries: int, failure: Exception) -> int | None:
        self._counters.webhooks.inc("failed" if tries < MAX_TRIES else "given_up")
        if tries >= MAX_TRIES:
            logger.error("job %s: its webhook is given up after %d tries: %s", job_id, tries, failure)
            return None
        pause_s = min(LAST_RETRY_S, self._first_retry_s * 2.0 ** (tries - 1)) * random.uniform(0.75, 1.25)
        logger.warning(
            "job %s: its webhook failed (%s); try %d in %.0f s", job_id, failure, tries + 1, pause_s
        )
        return round(pause_s * 1000)


def body_of(queue: str, notice: Notice) -> bytes:
    """Return the event: the job's end, with its result or its error.

    Raises DeliveryFailed for a result that this worker can't open: another one may have the key, or this one later.
    """
    outcome = notice.outcome
    if outcome.state == "succeeded" and outcome.error is not None:
        raise DeliveryFailed(outcome.error.message)
    data: dict[str, Any] = {
        "id": outcome.job_id,
        "queue": queue,
        "tenant": notice.tenant,
        "state": outcome.state,
        "metadata": outcome.metadata,
        "finished_at": notice.finished_at,
        "result": outcome.result.model_dump(mode="json") if outcome.result is not None else None,
        "error": outcome.error.model_dump(mode="json") if outcome.error is not None else None,
    }
    kind = "superseded" if outcome.is_superseded else outcome.state
    return json.dumps({"type": f"job.{kind}", "data": data}, ensure_ascii=False).encode()
