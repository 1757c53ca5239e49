"""A worker's interface to the queue: the wire's transitions over one connection, and the state of Redis.

Each thread that uses Redis has its own JobQueue, so that blocking reads do not delay lease renewals and
commits. They share one Connectivity.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import redis

from pagemill.monitoring.counters import RedisErrorKind, WorkerCounters
from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.calls.transitions import PullReply, RenewReply, SweepReply
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import AccessDenied, PagemillError, RedisUnavailable
from pagemill.producer.wire.server.clients import open_client
from pagemill.producer.wire.server.durability import sync
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.server.transport import SyncTransport, wrap_errors

logger = logging.getLogger(__name__)

T = TypeVar("T")

_MEMORY = {
    "ok": "the memory of Redis is no longer near the limit of queue %s",
    "near": "the memory of Redis is near the limit of queue %s, where new jobs are rejected; "
    "what holds it: pagemill queue stats",
    "full": "the memory of Redis is at the limit of queue %s: new jobs are rejected, running jobs continue; "
    "what holds it: pagemill queue stats",
}

SOCKET_TIMEOUT_S = 5.0
"""A server that does not answer within this time is unreachable. Blocking reads are shorter."""


class Connectivity:
    """Records whether Redis answers: every connection reports to it. Thread-safe."""

    def __init__(self, counters: WorkerCounters) -> None:
        self._counters = counters
        self._lock = threading.Lock()
        self._down_since: float | None = None
        self._was_up = False

    def record(self, name: str, began: float) -> None:
        """Record the end of a round trip of transition `name`, which started at `began` (monotonic)."""
        self._counters.redis_seconds.observe(name, time.monotonic() - began)

    @property
    def is_up(self) -> bool:
        return self._was_up and self._down_since is None

    def succeeded(self) -> None:
        if self.is_up:
            return
        with self._lock:
            if self._down_since is not None and self._was_up:
                away = time.monotonic() - self._down_since
                logger.warning("Redis is back after %.1f s: renewing leases, writing held results", away)
                self._counters.redis_reconnects.inc()
            self._down_since, self._was_up = None, True
            self._counters.redis_up = True

    def failed(self, error: RedisUnavailable) -> None:
        self._counters.redis_errors.inc(_kind(error))
        with self._lock:
            if self._down_since is None:
                self._down_since = time.monotonic()
                self._counters.redis_up = False
                logger.error(
                    "%s; no jobs are pulled, running jobs continue and their results are held, "
                    "trying again until it answers",
                    error,
                )


class ReaderConnectivity(Connectivity):
    """For read-only clients, which have no jobs or results to lose: they report outages themselves."""

    def __init__(self) -> None:
        super().__init__(WorkerCounters())

    def succeeded(self) -> None:
        pass

    def failed(self, error: RedisUnavailable) -> None:
        pass


class JobQueue:
    """One worker's transitions on one queue, over one connection.

    Raises RedisUnavailable whenever the server does not answer, or rejects writes.
    """

    def __init__(
        self, url: str, queue: str, worker_id: str, lease_ms: int, connectivity: Connectivity
    ) -> None:
        self._client = open_client(url, queue, socket_timeout=SOCKET_TIMEOUT_S, retry=None)
        self._transport = SyncTransport(self._client)
        self._connectivity = connectivity
        self._memory = "ok"
        self.queue = queue
        self.worker_id = worker_id
        self.lease_ms = lease_ms

    def pull(
        self,
        models: Sequence[str],
        max_jobs: int,
        max_cost_tokens: int,
        *,
        holding: int,
        longest: int,
        urgent_only: bool = False,
        has_store: bool = False,
        lacks: Collection[str] = (),
    ) -> PullReply:
        """See `transitions.pull`."""
        call = transitions.pull(
            self.queue,
            self.worker_id,
            models,
            max_jobs,
            max_cost_tokens,
            self.lease_ms,
            holding=holding,
            longest=longest,
            urgent_only=urgent_only,
            has_store=has_store,
            lacks=lacks,
        )
        reply = self.run(call)
        self._log_losses(reply.swept)
        return reply

    def sweep(self, patience_ms: int = 0) -> None:
        """See `transitions.sweep`."""
        swept = self.run(transitions.sweep(self.queue, patience_ms=patience_ms))
        self._log_losses(swept)
        self._log_memory(swept)

    def renew(self, held: Sequence[tuple[str, int]]) -> RenewReply:
        return self.run(transitions.renew(self.queue, self.worker_id, held, self.lease_ms))

    def wait_for_doorbell(self, models: Sequence[str], timeout_s: float) -> None:
        """Block until there may be a job for one of `models`, up to `timeout_s`.

        That must be below the socket's timeout.
        """
        bells = registry.doorbells(self.queue, models)
        self._guard(lambda: self._client.blpop(bells, timeout=max(0.01, timeout_s)))

    def next_command(self, timeout_s: float) -> bytes | None:
        """Return the next command to this worker; None if there was none for `timeout_s`."""
        key = keys.commands(self.queue, self.worker_id)
        taken = self._guard(lambda: self._client.blpop([key], timeout=timeout_s))
        return None if taken is None else bytes(taken[1])

    def server_time(self) -> float:
        """Return the server's clock in Unix seconds; half of the round trip is added."""
        began = time.monotonic()
        seconds, microseconds = self._guard(self._client.time)
        return float(seconds) + float(microseconds) / 1e6 + (time.monotonic() - began) / 2

    def server_info(self) -> dict[str, Any]:
        """Return the reply to INFO; empty if the server does not permit it."""
        try:
            info: dict[str, Any] = self._guard(self._client.info)
        except AccessDenied:
            return {}
        return info

    def run(self, call: Call[T]) -> T:
        began = time.monotonic()
        reply = self._guard(lambda: self._transport.run(call))
        self._connectivity.record(call.script, began)
        return reply

    def run_many(self, calls: Sequence[Call[T]]) -> list[T | PagemillError]:
        """Run calls in one round trip. A call that the server rejects yields its error in its place.

        Raises RedisUnavailable when the outcome of some call is unknown: send all of them again.
        """
        began = time.monotonic()
        replies = self._guard(lambda: self._transport.run_each(calls))
        self._connectivity.record(calls[0].script if calls else "other", began)
        return replies

    def sync(self) -> None:
        """Wait until every acknowledged write is in the server's file on disk; see durability.py."""
        self._guard(lambda: sync(self._client, self.queue))

    def listen_for_cancels(self) -> redis.client.PubSub:
        """Subscribe to cancellations, whose messages are job ids. Raises RedisUnavailable."""
        pubsub = self._client.pubsub(ignore_subscribe_messages=True)
        self._guard(lambda: pubsub.subscribe(keys.cancel_channel(self.queue)))
        return pubsub

    def next_cancel(self, pubsub: redis.client.PubSub, timeout_s: float) -> str | None:
        """Return the next cancelled job's id; None if there was none for `timeout_s`."""
        message = self._guard(lambda: pubsub.get_message(timeout=timeout_s))
        return message["data"].decode("utf-8", "replace") if message is not None else None

    def close(self) -> None:
        self._client.close()

    def _log_losses(self, swept: SweepReply) -> None:
        """Log the jobs that a sweep reclaimed or declared dead, since their crashed workers cannot."""
        for job_id, worker in swept.lapsed:
            logger.warning(
                "lease lapsed; its job waits for another worker",
                extra={"job_id": job_id, "lost_by": worker, "own": worker == self.worker_id},
            )
        for job_id, crashes in swept.buried:
            logger.warning(
                "job is dead: its workers died while they ran it; see: pagemill inspect %s --queue %s",
                job_id,
                self.queue,
                extra={"job_id": job_id, "code": "crash_suspect", "crashes": crashes},
            )

    def _log_memory(self, swept: SweepReply) -> None:
        """Log when the server's memory becomes short, and when it is sufficient again."""
        if swept.memory != self._memory:
            before, self._memory = self._memory, swept.memory
            level = logging.INFO if swept.memory == "ok" else logging.WARNING
            logger.log(
                level, _MEMORY[swept.memory], self.queue, extra={"memory": swept.memory, "was": before}
            )

    def _guard(self, operation: Callable[[], T]) -> T:
        try:
            with wrap_errors():
                value = operation()
        except RedisUnavailable as error:
            self._connectivity.failed(error)
            raise
        self._connectivity.succeeded()
        return value


class ServerClock:
    """The server's clock: job deadlines and timings use it.

    An offset from the monotonic clock: a step of the local wall clock would end jobs with a deadline.
    """

    def __init__(self) -> None:
        self._offset = time.time() - time.monotonic()

    def set(self, server_time: float) -> float:
        """Adopt the server's clock. Returns how far it is ahead of the local clock."""
        self._offset = server_time - time.monotonic()
        return server_time - time.time()

    def now(self) -> float:
        return time.monotonic() + self._offset


def warn_about_server(info: dict[str, Any]) -> None:
    """Warn of server settings that endanger jobs. Reads INFO only: managed servers hide CONFIG."""
    if not info:
        logger.warning(
            "this Redis denies INFO: check that its maxmemory-policy is noeviction and that it has an append-only file"
        )
        return
    policy = str(info.get("maxmemory_policy", "noeviction"))
    if policy != "noeviction":
        logger.warning(
            "THIS REDIS MAY DELETE JOBS: its maxmemory-policy is %s, so it evicts keys when memory runs out; "
            "set maxmemory-policy noeviction",
            policy,
        )
    if not info.get("aof_enabled"):
        logger.warning(
            "THIS REDIS MAY LOSE JOBS: it has no append-only file, so a crash takes everything since the "
            "last snapshot with it; set appendonly yes"
        )


def _kind(error: RedisUnavailable) -> RedisErrorKind:
    cause = error.__cause__
    if isinstance(cause, redis.TimeoutError):
        return "timeout"
    if isinstance(cause, redis.ResponseError):
        return "response"
    return "connection" if isinstance(cause, redis.ConnectionError | OSError) else "other"
