"""Passes the ends of jobs that Celery tasks submitted to Celery's tracer: results, links, chains, chords. It also
writes PROGRESS, and converts revocations to cancellations.

Entries are claimed from the outbox and settled after the tracer has run. If a relay crashes in between, the next one
takes over, so a link may run twice; writing a result is idempotent.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from celery import Celery, signals
from celery.app.task import Context
from celery.app.trace import build_tracer
from celery.exceptions import TaskRevokedError

from pagemill.producer.celery.native import RELAY
from pagemill.producer.celery.progress import ProgressWriter
from pagemill.producer.celery.revocations import revoke_jobs
from pagemill.producer.celery.task_message import TaskMessage, with_result
from pagemill.producer.wire.calls import outbox
from pagemill.producer.wire.calls.outbox import Notice
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.schema.outputs import Timing
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.transport import SyncTransport

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

AT_ONCE = 50
CLAIM_MS = 60_000
LOOK_S = 0.25
AWAY_S = 1.0
PROGRESS_S = 1.0
RETRY_MS = 5_000
MAX_TRIES = 20


class Relay:
    """One relay of one queue and one app; several may run in parallel."""

    def __init__(self, app: Celery, url: str, queue: str) -> None:
        self._app = app
        self.queue = queue
        self._client = open_client(url, queue)
        self._transport = SyncTransport(self._client)
        self._stop = threading.Event()
        self._tracers: dict[str, Any] = {}
        self._started_at: float | None = None
        self._progress = ProgressWriter(app, queue, self._transport)
        self._progress_at = 0.0

    def run(self) -> None:
        """Relay until `stop`."""
        self._app.set_current()  # a link's signature looks up its tasks and routes in this thread's app
        while not self._stop.is_set():
            try:
                self._write_progress()
                if self.relay() < AT_ONCE:
                    self._stop.wait(LOOK_S)
            except RedisUnavailable as error:
                logger.warning("no server: %s", error, extra=IN_LOOP)
                self._stop.wait(AWAY_S)
        self.close()

    def close(self) -> None:
        """Close the connection to the queue's server."""
        self._client.close()

    def stop(self) -> None:
        self._stop.set()

    def revoke(self, task_ids: Sequence[str], terminate: bool) -> None:
        """Cancel the jobs of these tasks; without `terminate` only waiting ones. Safe from any thread."""
        revoke_jobs(self.queue, self._transport, task_ids, terminate)

    def relay(self) -> int:
        """Check the outbox once; returns the number of claimed ends."""
        notices = self._transport.run(outbox.claim(self.queue, AT_ONCE, CLAIM_MS, relay=RELAY))
        for notice in notices:
            again_ms = self._try(notice)
            self._transport.run(
                outbox.finish_delivery(self.queue, notice.outcome.job_id, notice.tries, again_ms, relay=RELAY)
            )
        return len(notices)

    def _write_progress(self) -> None:
        if time.monotonic() < self._progress_at:
            return
        self._progress_at = time.monotonic() + PROGRESS_S
        try:
            self._progress.write()
        except RedisUnavailable:
            raise
        except Exception as error:  # any error of the backend: progress is optional
            logger.warning("no progress: %s", error, extra=IN_LOOP)

    def _try(self, notice: Notice) -> int | None:
        job_id = notice.outcome.job_id
        try:
            self._trace(notice)
        except Exception:
            logger.exception("job %s could not be relayed (try %d)", job_id, notice.tries)
            return RETRY_MS if notice.tries < MAX_TRIES else None
        return None

    def _trace(self, notice: Notice) -> None:
        notice = replace(notice, outcome=with_result(notice.outcome))
        job_id = notice.outcome.job_id
        message = TaskMessage.from_metadata(notice.outcome.metadata)
        if message is None:
            logger.warning("job %s names no Celery message; leaving it", job_id)
            return
        end = message.end(notice.outcome)
        if isinstance(end, TaskRevokedError):
            self._announce_revoked(job_id, message, str(end))
            return
        self._started_at = time.monotonic() - _run_s(notice)
        self._tracer(message.headers["task"])(job_id, (), {}, message.request(job_id, end))

    def _tracer(self, name: str) -> Any:
        if name not in self._tracers:
            task = self._app.tasks[name]
            self._tracers[name] = build_tracer(
                name, task, self._app.loader, app=self._app, propagate=False, monotonic=self._clock
            )
        return self._tracers[name]

    def _clock(self) -> float:
        """Return the time; for a tracer's first reading the start of the job, so that it reports the job's runtime."""
        started_at, self._started_at = self._started_at, None
        return time.monotonic() if started_at is None else started_at

    def _announce_revoked(self, job_id: str, message: TaskMessage, reason: str) -> None:
        """Perform the actions of a Celery worker for a task that was revoked, or has expired."""
        task = self._app.tasks[message.headers["task"]]
        request = Context(message.request(job_id))
        is_expired = reason == "expired"
        task.backend.mark_as_revoked(job_id, reason, request=request, store_result=message.wants_result)
        signals.task_revoked.send(
            sender=task, request=request, terminated=not is_expired, signum=None, expired=is_expired
        )


def _run_s(notice: Notice) -> float:
    """Return the seconds that the job ran, without its wait."""
    timing = notice.outcome.result.timing if notice.outcome.result else Timing()
    return max(0.0, (timing.e2e_s or 0.0) - (timing.queue_s or 0.0))
