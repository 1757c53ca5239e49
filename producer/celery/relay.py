"""Passes the ends of jobs that Celery tasks submitted to Celery's tracer: results, links, chains, chords.

Entries are claimed from the outbox and settled after the tracer has run. If a relay dies in between, the next
one takes them over, so a link may run twice; writing a result is idempotent.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer

from pagemill.producer.celery.native import RELAY, told_message
from pagemill.producer.celery.task import desk, plain_error, plain_result
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import JobError, RedisUnavailable
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.transport import SyncTransport

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

AT_ONCE = 50
CLAIM_MS = 60_000
LOOK_S = 0.25
AWAY_S = 1.0
RETRY_MS = 5_000
MAX_TRIES = 20


class Relay:
    """One relay of one queue and one app; several may run side by side."""

    def __init__(self, app: Celery, url: str, queue: str) -> None:
        self._app = app
        self._queue = queue
        self._client = open_client(url, queue)
        self._transport = SyncTransport(self._client)
        self._stop = threading.Event()
        self._tracers: dict[str, Any] = {}

    def run(self) -> None:
        """Relay until `stop`."""
        while not self._stop.is_set():
            try:
                if self.relay() < AT_ONCE:
                    self._stop.wait(LOOK_S)
            except RedisUnavailable as error:
                logger.warning("no server: %s", error, extra=IN_LOOP)
                self._stop.wait(AWAY_S)
        self._client.close()

    def stop(self) -> None:
        self._stop.set()

    def relay(self) -> int:
        """Check the outbox once; returns the number of ends taken."""
        notices = self._transport.run(outbox.claim(self._queue, AT_ONCE, CLAIM_MS, relay=RELAY))
        for notice in notices:
            again_ms = self._try(notice)
            self._transport.run(
                outbox.settle(self._queue, notice.outcome.job_id, notice.tries, again_ms, relay=RELAY)
            )
        return len(notices)

    def _try(self, notice: Notice) -> int | None:
        job_id = notice.outcome.job_id
        try:
            self._trace(notice)
        except Exception:
            logger.exception("job %s could not be relayed (try %d)", job_id, notice.tries)
            return RETRY_MS if notice.tries < MAX_TRIES else None
        return None

    def _trace(self, notice: Notice) -> None:
        job_id = notice.outcome.job_id
        told = told_message(notice.outcome.metadata)
        if told is None:
            logger.warning("job %s names no Celery message; leaving it", job_id)
            return
        headers, embed = told
        try:
            result = notice.outcome.value()
        except JobError as error:
            desk.leave(job_id, plain_error(error))
        else:
            assert result is not None, "an outbox entry is of a job that has ended"
            desk.leave(job_id, plain_result(result))
        request = {
            **headers,
            **embed,
            "args": (),
            "kwargs": {},
            "is_eager": False,
            "delivery_info": {},
            "hostname": "pagemill-relay",
            "correlation_id": job_id,
        }
        name = headers["task"]
        if name not in self._tracers:
            task = self._app.tasks[name]
            self._tracers[name] = build_tracer(name, task, app=self._app, propagate=False)
        self._tracers[name](job_id, (), {}, request)
