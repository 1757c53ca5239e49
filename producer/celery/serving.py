"""Additions of `pagemill celery-worker` to Celery's worker: `pagemill.generate`, revocation, early redelivery."""

from __future__ import annotations

import time
from typing import Any

from celery import Celery, bootsteps
from celery.exceptions import Ignore, WorkerTerminate
from celery.platforms import signals
from celery.worker import state
from celery.worker.request import Request

from pagemill.producer.celery.task import CHECK, TASK_NAME, NativeTask
from pagemill.producer.client.sync import Producer

VISIBILITY_S = 30
"""Seconds without a refresh after which a message is delivered again."""
REFRESH_S = 5.0
TRANSPORT_OPTIONS: dict[str, Any] = {
    # Separate keys: on the shared ones a short timeout would run other workers' long tasks twice.
    "unacked_key": "pagemill:celery:unacked",
    "unacked_index_key": "pagemill:celery:unacked_index",
    "unacked_mutex_key": "pagemill:celery:unacked_mutex",
    "unacked_mutex_expire": 10,
    "visibility_timeout": VISIBILITY_S,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
}


class GenerationRequest(Request):  # type: ignore[misc]
    """A generation that `revoke(terminate=True)` can stop, although threads cannot be terminated.

    It does not start after its expiry, which Celery only checks before a task waits for a thread. The thread of the
    task ends it and announces the end, so that PROGRESS is never stored after REVOKED.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._request_dict[CHECK] = self._check
        self._signal: Any = None
        self._has_begun = self._is_expired = False

    def terminate(self, pool: Any, signal: Any = None) -> None:
        self._signal = signals.signum(signal or "TERM")

    def cancel(self, pool: Any, signal: Any = None, **options: Any) -> None:
        if self.time_start:
            self._announce_cancelled(**options)

    def on_failure(self, exc_info: Any, *args: Any, **options: Any) -> Any:
        error = getattr(exc_info.exception, "exc", exc_info.exception)
        if self._is_expired and isinstance(error, Ignore):
            return self._announce_revoked("expired", False, None, True)
        if self._signal is not None and isinstance(error, Ignore):
            return self._announce_revoked("terminated", True, self._signal, False)
        return super().on_failure(exc_info, *args, **options)

    def _check(self) -> None:
        """Raise Ignore after a revocation or an expiry, and WorkerTerminate if the message must be delivered again.

        That is the case if the worker exits without waiting for tasks: the next delivery finds the job by its id.
        """
        if not self._has_begun:
            self._has_begun = True
            self._is_expired = bool(self.maybe_expire())
        if self._signal is not None or self._is_expired:
            raise Ignore
        is_exiting = state.should_terminate is not None and state.should_terminate is not False
        if is_exiting or self._already_cancelled:
            raise WorkerTerminate


class VisibilityRefresher(bootsteps.StartStopStep):  # type: ignore[misc]
    """Prevents redelivery of the messages that this worker holds."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        self._entry = parent.timer.call_repeatedly(REFRESH_S, self._refresh, (parent,))

    def stop(self, parent: Any) -> None:
        self._entry.cancel()

    def _refresh(self, consumer: Any) -> None:
        channel = consumer.task_consumer.channel
        tags = list(getattr(channel.qos, "_delivered", ()))
        if tags and hasattr(channel, "unacked_index_key"):
            now = time.time()
            with channel.conn_or_acquire() as client:
                client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)


def serve_task(app: Celery, url: str, queue: str, model: str, celery_queue: str) -> None:
    """Register `pagemill.generate` for a native queue, unless the app has a task of that name.

    `celery_queue`: for generations that other tasks send from this worker.
    """
    if TASK_NAME not in app.tasks:
        fields = {
            "name": TASK_NAME,
            "abstract": False,
            "model": model,
            "queue": celery_queue,
            "producer": Producer(url, queue=queue),
        }
        app.register_task(type("generate", (NativeTask,), fields)())
    app.steps["consumer"].add(VisibilityRefresher)
