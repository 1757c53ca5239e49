"""Bootsteps of a Celery worker with our pool: keep its messages, and adapt the prefetch to the engine."""

from __future__ import annotations

import logging
import threading
import time
from typing import Any

import redis
from celery import bootsteps

from pagemill.producer.celery.pool import EnginePool
from pagemill.producer.celery.run_clock import tracer
from pagemill.producer.celery.task import TASK_NAME
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.transport import SyncTransport

logger = logging.getLogger(__name__)

VISIBILITY_S = 30
"""Seconds without a refresh after which a message is delivered again."""
REFRESH_S = 5.0
ADJUST_S = 1.0
SLACK = 8
"""Generations that may wait in the native queue, so that the engine never idles."""

TRANSPORT_OPTIONS: dict[str, Any] = {
    # Separate keys: on the shared ones a short timeout would make other workers' long tasks run twice.
    "unacked_key": "pagemill:celery:unacked",
    "unacked_index_key": "pagemill:celery:unacked_index",
    "unacked_mutex_key": "pagemill:celery:unacked_mutex",
    "unacked_mutex_expire": 10,
    "visibility_timeout": VISIBILITY_S,
    "unacked_restore_interval": 5,
    "unacked_restore_throttle": 1,
}


class RunTimes(bootsteps.StartStopStep):  # type: ignore[misc]
    """Makes the tracer of generations count from when they were accepted, not from when it starts itself."""

    requires = ("celery.worker.consumer.tasks:Tasks",)

    def start(self, parent: Any) -> None:
        parent.app.tasks[TASK_NAME].__trace__ = tracer(parent.app, TASK_NAME, parent.hostname)

    def stop(self, parent: Any) -> None:
        """Nothing to undo: Celery builds the tracers again at the next start."""


class _Periodic(bootsteps.StartStopStep):  # type: ignore[misc]
    """Calls `tick` periodically on a thread while the consumer lives."""

    requires = ("celery.worker.consumer.tasks:Tasks",)
    interval_s = 1.0

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._stopped = threading.Event()

    def start(self, parent: Any) -> None:
        self._stopped = threading.Event()
        thread = threading.Thread(target=self._run, args=(parent, self._stopped), name=self.name, daemon=True)
        thread.start()

    def stop(self, parent: Any) -> None:
        self._stopped.set()

    def tick(self, consumer: Any) -> None:
        raise NotImplementedError

    def _run(self, consumer: Any, stopped: threading.Event) -> None:
        while not stopped.wait(self.interval_s):
            try:
                self.tick(consumer)
            except (redis.RedisError, PagemillError, OSError, RuntimeError, AttributeError) as error:
                # Reconnecting, or the consumer is stopping: retried at the next tick.
                logger.debug("%s: %s", self.name, error)


class VisibilityRefresher(_Periodic):
    """Keeps the messages that this worker holds from being delivered again."""

    interval_s = REFRESH_S

    def tick(self, consumer: Any) -> None:
        channel = consumer.task_consumer.channel
        tags = list(channel.qos._delivered)
        if tags:
            now = time.time()
            with channel.conn_or_acquire() as client:
                client.zadd(channel.unacked_index_key, dict.fromkeys(tags, now), xx=True)


class PrefetchAdapter(_Periodic):
    """Prefetches more messages while the engine has room, and fewer when generations queue up."""

    interval_s = ADJUST_S

    def __init__(self, parent: Any, **options: Any) -> None:
        super().__init__(parent, **options)
        self._transport: SyncTransport | None = None

    def tick(self, consumer: Any) -> None:
        settings, pool = EnginePool.settings, EnginePool.current
        if pool is None or consumer.qos is None:
            return
        if self._transport is None:
            self._transport = SyncTransport(open_client(settings.url, settings.queue))
        waiting = self._transport.run(registry.stats_page(settings.queue)).totals.counts.get("queued", 0)
        change = wanted_change(waiting, pool.num_running, consumer.qos.value, pool.limit)
        if change > 0:
            consumer.qos.increment_eventually(change)
        elif change < 0:
            consumer.qos.decrement_eventually(-change)


def wanted_change(waiting: int, running: int, prefetch: int, limit: int) -> int:
    """Return the change of the prefetch count: down by what queues up, up by half while nothing does.

    `limit` is the upper bound of the count; the lower is 1.
    """
    if waiting > SLACK:
        return max(1, min(prefetch, running) - (waiting - SLACK)) - prefetch
    return min(limit, prefetch + max(1, prefetch // 2)) - prefetch
