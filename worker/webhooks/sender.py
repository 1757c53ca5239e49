"""Delivers webhooks from the outbox, on its own threads and connection, so that commits do not wait for it.

One thread reads Redis and selects deliveries, which run on a thread pool.
"""

from __future__ import annotations

import json
import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from pagemill.common.backoff import Backoff, pause_after
from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.outbox import Due, Notice
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError, RedisUnavailable, StoreError
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.schema.sealing import SealedError
from pagemill.producer.wire.store.store import Store
from pagemill.producer.wire.webhooks.delivery import TIMEOUT_S, DeliveryFailed, deliver
from pagemill.producer.wire.webhooks.policy import Refused, Unresolved, WebhookPolicy
from pagemill.producer.wire.webhooks.receivers import AT_ONCE, Receivers
from pagemill.worker.background import BackgroundThread
from pagemill.worker.job_queue import JobQueue

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

READ_EVERY_S = 0.5
LISTED = 1000
"""Maximum number of due deliveries per read."""
CLAIM_S = 4 * TIMEOUT_S
"""Longer than a delivery can take: resolving, connecting, sending, waiting for the response."""
STOP_S = 0.8
"""Seconds for deliveries in progress when the worker stops."""
MAX_TRIES = 12
FIRST_RETRY_S = 5.0
LAST_RETRY_S = 3600.0
JITTER = 0.25
PAYLOAD_LOST = "payload_lost"


@dataclass(frozen=True, slots=True)
class _Attempt:
    notice: Notice
    again_ms: int | None
    """Milliseconds until the next attempt; None if there is none."""
    is_success: bool | None
    """None if the receiver was not called."""
    outcome: str
    """For the job's history."""
    pause_s: float = 0.0
    """Pause that the receiver requested, in seconds."""


class WebhookSender(BackgroundThread):
    def __init__(
        self,
        queue: JobQueue,
        policy: WebhookPolicy,
        secrets: Sequence[bytes],
        counters: WorkerCounters,
        *,
        store: Store | None = None,
        ca_file: Path | None = None,
        first_retry_s: float = FIRST_RETRY_S,
    ) -> None:
        """`secrets`: the signing keys, the current one first. `store`: has large results. `ca_file`: replaces the
        system's CAs."""
        super().__init__("pagemill-webhooks")
        self._queue = queue
        self._policy = policy
        self._secrets = tuple(secrets)
        self._store = store
        self._counters = counters
        self._first_retry_s = first_retry_s
        self._tls = ssl.create_default_context(cafile=ca_file)
        self._receivers = Receivers(first_retry_s)
        self._due: list[Due] = []
        self._has_more = False
        """The last read did not return all due deliveries."""
        self._later_ms: dict[str, int] = {}
        self._read_at = 0.0
        self._ended: SimpleQueue[_Attempt] = SimpleQueue()
        self._unsettled: deque[_Attempt] = deque()
        self._changed = threading.Event()

    def stop(self, timeout: float) -> None:
        self._stop.set()
        self._changed.set()
        super().stop(timeout)

    def _run(self) -> None:
        backoff = Backoff()
        pool = ThreadPoolExecutor(AT_ONCE, thread_name_prefix="pagemill-webhook")
        while not self._stop.is_set():
            try:
                self._store_results()
                self._start(pool)
                backoff.reset()
                if self._due or not self._has_more:
                    self._changed.wait(READ_EVERY_S)
                self._changed.clear()
            except RedisUnavailable:
                self._stop.wait(backoff.next())
            except Exception:
                logger.exception("delivering webhooks failed; continuing")
                self._stop.wait(READ_EVERY_S)
        pool.shutdown(wait=False, cancel_futures=True)
        self._store_last_results()

    def _start(self, pool: ThreadPoolExecutor) -> None:
        """Start the due deliveries whose receivers have capacity."""
        if time.monotonic() >= self._read_at or (self._has_more and not self._due):
            self._read_due()
        choice = self._receivers.choose(self._due)
        self._later_ms |= choice.later_ms
        claimed: set[str] = set()
        wanted = [each.job_id for each in choice.start]
        try:
            if wanted:
                claim = outbox.claim(self._queue.queue, len(wanted), round(CLAIM_S * 1000), job_ids=wanted)
                for notice in self._queue.run(claim):
                    pool.submit(self._attempt, notice)
                    claimed.add(notice.outcome.job_id)
        finally:
            for job_id in wanted:
                if job_id not in claimed:  # it did not fit into the reply, or another worker has it
                    self._receivers.ended(job_id, None)
        self._due = [
            each for each in self._due if each.job_id not in claimed and each.job_id not in choice.later_ms
        ]

    def _read_due(self) -> None:
        pending = self._queue.run(outbox.read_due(self._queue.queue, LISTED, self._later_ms))
        self._later_ms = {}
        self._due, self._has_more = pending.first, pending.due > len(pending.first)
        self._read_at = time.monotonic() + READ_EVERY_S
        in_flight = self._receivers.in_flight
        self._counters.webhooks_pending = {
            "due": pending.due,
            "in_flight": in_flight,
            "later": max(0, pending.total - pending.due - in_flight),
        }
        self._counters.webhook_receivers_paused = self._receivers.paused
        if pending.expired:
            self._counters.webhooks.inc("given_up", pending.expired)
            logger.error("%d webhooks are given up: the records of their jobs expired", pending.expired)

    def _store_results(self) -> None:
        """Store the results of attempts, so that only lost attempts let their claims lapse."""
        while not self._ended.empty():
            attempt = self._ended.get()
            self._receivers.ended(attempt.notice.outcome.job_id, attempt.is_success, attempt.pause_s)
            self._unsettled.append(attempt)
        while self._unsettled:
            attempt = self._unsettled[0]
            settle = outbox.finish_delivery(
                self._queue.queue,
                attempt.notice.outcome.job_id,
                attempt.notice.tries,
                attempt.again_ms,
                outcome=attempt.outcome,
            )
            self._queue.run(settle)
            self._unsettled.popleft()

    def _store_last_results(self) -> None:
        """Wait briefly for deliveries in progress. Another worker repeats the rest."""
        until = time.monotonic() + STOP_S
        try:
            self._store_results()
            while self._receivers.in_flight and (rest_s := until - time.monotonic()) > 0:
                self._changed.wait(rest_s)
                self._changed.clear()
                self._store_results()
        except PagemillError as error:
            logger.warning("results of webhooks are not stored: %s; they will be sent again", error)

    def _attempt(self, notice: Notice) -> None:
        try:
            attempt = self._deliver(notice)
        except Exception as error:  # an internal error: retried like a failure
            logger.exception("job %s: its webhook failed", notice.outcome.job_id)
            attempt = self._failed(notice, error, is_success=None)
        self._ended.put(attempt)
        self._changed.set()

    def _deliver(self, notice: Notice) -> _Attempt:
        job_id = notice.outcome.job_id
        try:
            body = body_of(self._queue.queue, notice, self._store)
        except DeliveryFailed as failure:
            return self._failed(notice, failure, is_success=None)
        try:
            target = self._policy.resolve(notice.url)
            event_id = f"{job_id}-superseded" if notice.outcome.is_superseded else job_id
            deliver(target, event_id, body, self._secrets, self._tls)
        except Refused as refusal:
            self._counters.webhooks.inc("refused")
            logger.warning("job %s: its webhook is not called: %s", job_id, refusal)
            return _Attempt(notice, None, None, f"refused: {refusal}")
        except Unresolved as failure:
            return self._failed(notice, failure, is_success=False)
        except DeliveryFailed as failure:
            if failure.is_final:
                self._counters.webhooks.inc("given_up")
                logger.error("job %s: its webhook is given up: %s", job_id, failure)
                # the receiver works, since it responded
                return _Attempt(notice, None, True, f"given up: {failure}")
            return self._failed(notice, failure, is_success=False, pause_s=failure.retry_after_s)
        self._counters.webhooks.inc("delivered")
        return _Attempt(notice, None, True, "delivered")

    def _failed(
        self, notice: Notice, failure: Exception, *, is_success: bool | None, pause_s: float = 0.0
    ) -> _Attempt:
        again_ms = self._again_ms(notice, failure, pause_s)
        word = "failed" if again_ms is not None else "given up"
        return _Attempt(notice, again_ms, is_success, f"{word}: {failure}", pause_s)

    def _again_ms(self, notice: Notice, failure: Exception, least_s: float) -> int | None:
        """Count a failure. Returns the milliseconds until the next attempt, or None if there is none."""
        job_id, tries = notice.outcome.job_id, notice.tries
        self._counters.webhooks.inc("failed" if tries < MAX_TRIES else "given_up")
        if tries >= MAX_TRIES:
            logger.error("job %s: its webhook is given up after %d tries: %s", job_id, tries, failure)
            return None
        pause_s = max(
            pause_after(tries, self._first_retry_s, LAST_RETRY_S, JITTER), min(LAST_RETRY_S, least_s)
        )
        logger.warning(
            "job %s: its webhook failed (%s); try %d in %.0f s", job_id, failure, tries + 1, pause_s
        )
        return round(pause_s * 1000)


def body_of(queue: str, notice: Notice, store: Store | None = None) -> bytes:
    """Return the event: the job's end, with its result or its error.

    Raises DeliveryFailed for a result that this worker cannot open or fetch: another, or later this one, may be able
    to.
    """
    outcome = _loaded(notice.outcome, store)
    if outcome.state == "succeeded" and outcome.error is not None and outcome.error.code != PAYLOAD_LOST:
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


def _loaded(outcome: Outcome, store: Store | None) -> Outcome:
    """Return an outcome with its result, from the store if necessary. Raises DeliveryFailed."""
    if outcome.stored is None:
        return outcome
    if store is None:
        raise DeliveryFailed("the result is in a store, and this worker has none")
    try:
        return outcome.loaded(store.read(outcome.stored.reference))
    except SealedError as error:
        raise DeliveryFailed(str(error)) from error
    except (StoreError, ValueError) as error:
        if isinstance(error, StoreError) and error.kind != "lost":
            raise DeliveryFailed(str(error)) from error
        return replace(outcome, stored=None, error=ErrorInfo(code=PAYLOAD_LOST, message=str(error)))
