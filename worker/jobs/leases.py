"""Keeps the worker's leases: renews them, and detects lost and cancelled jobs.

It has its own thread and connection, so that leases do not lapse during a long step or a slow commit. It
renews only while the engine makes progress: a hung worker must lose its jobs to a healthy one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Protocol

from redis.client import PubSub

from pagemill.common.backoff import Backoff
from pagemill.producer.wire.calls.registry import WorkerInfo, heartbeat, unregister
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.context import WorkerContext

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

CANCEL_POLL_S = 0.2
"""Maximum wait for a pushed cancellation, which also bounds the time to stop."""


class LeaseListener(Protocol):
    """Receives lost and cancelled jobs. Called on the keeper's thread; must not block."""

    def lost(self, job_id: str, token: int) -> None: ...

    def cancelled(self, job_id: str) -> None: ...


class LeaseKeeper:
    def __init__(
        self,
        context: WorkerContext,
        queue: JobQueue,
        listener: LeaseListener,
        *,
        is_well: Callable[[], bool],
        describe: Callable[[], WorkerInfo],
    ) -> None:
        """`is_well`: whether the engine makes progress; `describe`: the worker's entry in the registry."""
        self._queue = queue
        self._table = context.table
        self._listener = listener
        self._clock = context.clock
        self._counters = context.counters
        self._renew_s = context.config.renew_s
        self._is_well = is_well
        self._describe = describe
        self._was_well = True
        self._pubsub: PubSub | None = None
        self._renewed = threading.Condition()
        self._renewed_at = 0.0
        self._announce = threading.Event()
        self.announced: WorkerInfo | None = None
        """The worker's entry in the registry, as last written; None: not written since the last outage."""
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-leases", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> None:
        """Stop renewing and remove the worker from the registry."""
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join(timeout)

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def announce(self) -> None:
        """Have the worker's entry in the registry updated within `CANCEL_POLL_S`, without waiting for it."""
        self._announce.set()

    def wait_renewed(self, since: float, timeout: float) -> bool:
        """Wait for a renewal that started after `since` (monotonic).

        After an outage, no pull may precede it: a pull sweeps, and this worker's leases have lapsed.
        """
        with self._renewed:
            return self._renewed.wait_for(lambda: self._renewed_at > since, timeout)

    def _run(self) -> None:
        backoff = Backoff(max_s=min(0.5, self._renew_s))
        due = 0.0
        while not self._stop.is_set():
            try:
                if time.monotonic() >= due or self._announce.is_set():
                    self._announce.clear()
                    due = time.monotonic() + self._renew_s
                    self._beat()
                self._listen(min(CANCEL_POLL_S, max(0.0, due - time.monotonic())))
                backoff.reset()
            except RedisUnavailable:
                self._counters.lease_renewals.inc("error")
                self.announced = None
                self._unsubscribe()
                due = 0.0
                self._stop.wait(backoff.next())
            except Exception:
                logger.exception("renewing leases failed; trying again")
                self._counters.lease_renewals.inc("error")
                due = 0.0
                self._stop.wait(self._renew_s / 2)
        self._unregister()

    def _beat(self) -> None:
        is_well = self._is_well()
        held = len(self._table)
        if is_well:
            self._renew_leases()
        elif self._was_well and held:
            logger.error("the engine does not make progress: %d leases are not renewed", held)
        self._was_well = is_well or not held
        self._counters.redis_clock_skew_s = self._clock.set(self._queue.server_time())
        info = self._describe()
        self._queue.run(heartbeat(self._queue.queue, info))
        self.announced = info
        self._queue.sweep()

    def _renew_leases(self) -> None:
        began = time.monotonic()
        held = self._table.leases()
        # Renew before anything else: after an outage, every millisecond lets other workers reclaim the jobs.
        reply = self._queue.renew(held)
        self._counters.leases_held = len(held) - len(reply.lost)
        self._counters.lease_renewals.inc("renewed", len(held) - len(reply.lost))
        tokens = dict(held)
        for job_id in reply.lost:
            self._counters.lease_renewals.inc("lost")
            self._listener.lost(job_id, tokens[job_id])
        for job_id in reply.cancelled:
            self._listener.cancelled(job_id)
        with self._renewed:
            self._renewed_at = began
            self._renewed.notify_all()

    def _listen(self, timeout_s: float) -> None:
        """Wait for pushed cancellations. The next renewal would report them too, but later."""
        if self._pubsub is None:
            self._pubsub = self._queue.listen_for_cancels()
        job_id = self._queue.next_cancel(self._pubsub, timeout_s)
        if job_id is not None:
            self._listener.cancelled(job_id)

    def _unsubscribe(self) -> None:
        if self._pubsub is not None:
            self._pubsub.close()
            self._pubsub = None

    def _unregister(self) -> None:
        self._unsubscribe()
        try:
            self._queue.run(unregister(self._queue.queue, self._queue.worker_id))
        except RedisUnavailable:
            logger.info("could not unregister the worker; its entry expires automatically")
        except Exception:
            logger.exception("could not unregister the worker; its entry expires automatically")
