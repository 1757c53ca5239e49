"""`pagemill exporter`: queue gauges for Prometheus without a worker, to scale from zero and to alert on
missing workers. Does not load model libraries.

Each read sweeps first: even without workers, delayed jobs become due and lapsed leases end, so that all jobs
waiting for a worker are counted.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType

from pagemill.common.installed import installed_version
from pagemill.monitoring.metrics.queue_exposition import QueueExposition, QueueReadings
from pagemill.monitoring.queue_figures import QueueFigures
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.process.stop_signals import stop_signals
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import AccessDenied, RedisUnavailable
from pagemill.producer.wire.server.clients import open_masters
from pagemill.producer.wire.server.transport import wrap_errors
from pagemill.worker.job_queue import JobQueue, ReaderConnectivity, ServerClock
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.status.queue_reader import QueueReader
from pagemill.worker.status.server import Health, Probes, StatusServer

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

DISCOVER_EVERY_S = 60.0
SCAN_COUNT = 1000
LEASE_PATIENCE_MS = 10_000
"""Leases that lapsed more recently are left to the workers: after an outage, all of theirs have lapsed."""
_SEEN_IN = ("counts", "workers")
"""A queue has one of these keys once it has had a job or a worker."""


def discover(url: str) -> list[str]:
    """List every queue on the server, or on any master of a Cluster. Raises RedisUnavailable.

    Walks the keyspace, a thousand keys at a time.
    """
    found: set[str] = set()
    with wrap_errors(), contextlib.ExitStack() as stack:
        for client in [stack.enter_context(client) for client in open_masters(url)]:
            # One pattern for both names needs only one scan.
            found |= {key.decode() for key in client.scan_iter("pagemill:{*}:[cw]o*s", count=SCAN_COUNT)}
    names = (key.removeprefix("pagemill:{").partition("}:") for key in found)
    return sorted(
        {name for name, _, rest in names if rest in _SEEN_IN and keys.QUEUE_PATTERN.fullmatch(name)}
    )


class QueueSet:
    """The exported queues: a fixed list, or all, rediscovered periodically."""

    def __init__(
        self,
        url: str,
        names: Sequence[str] = (),
        discover_every_s: float = DISCOVER_EVERY_S,
        lease_patience_ms: int = LEASE_PATIENCE_MS,
    ) -> None:
        self._url = url
        self._finds_all = not names
        self._discover_every_s = discover_every_s
        self._discover_at = 0.0
        self._connectivity = ReaderConnectivity()
        self._readers: dict[str, tuple[JobQueue, ServerClock, QueueReader]] = {}
        self._errors = 0
        self._lease_patience_ms = lease_patience_ms
        self._may_sweep = True
        for name in names:
            self._add(name)

    def read(self) -> QueueReadings:
        """Read every queue. Unreadable queues are left out; if Redis is unreachable, all are."""
        figures: list[QueueFigures] = []
        try:
            self._discover()
            for queue, clock, reader in self._readers.values():
                clock.set(queue.server_time())
                self._sweep(queue)
                figures.append(reader.read())
            is_up = True
        except RedisUnavailable as error:
            logger.warning("%s; nothing is exported until it answers", error, extra=IN_LOOP)
            self._errors += 1
            figures, is_up = [], False
        return QueueReadings(figures, is_up, self._errors, installed_version())

    def close(self) -> None:
        for queue, _, _ in self._readers.values():
            queue.close()

    def _sweep(self, queue: JobQueue) -> None:
        if not self._may_sweep:
            return
        try:
            queue.sweep(self._lease_patience_ms)
        except AccessDenied as error:
            logger.warning("%s; without a worker, delayed jobs do not become due", error)
            self._may_sweep = False

    def _discover(self) -> None:
        if not self._finds_all or time.monotonic() < self._discover_at:
            return
        found = discover(self._url)
        self._discover_at = time.monotonic() + self._discover_every_s
        for name in found:
            if name not in self._readers:
                logger.info("found queue %s", name)
                self._add(name)
        for name in self._readers.keys() - set(found):
            self._readers.pop(name)[0].close()

    def _add(self, name: str) -> None:
        queue = JobQueue(self._url, name, "exporter", 0, self._connectivity)
        clock = ServerClock()
        self._readers[name] = (queue, clock, QueueReader(queue, clock))


class QueueExporter:
    """Serves /metrics, /healthz (always good), /readyz and /startupz (Redis answers) until closed."""

    def __init__(self, queues: QueueSet, host: str, port: int) -> None:
        """Raises `pagemill.worker.status.server.PortTaken`, or OSError for a host of another machine."""
        self._queues = queues
        self._is_up = False
        self._reading = threading.Lock()
        probes = Probes(
            metrics=QueueExposition(self._read).render,
            health=lambda: self._health(True),
            readiness=lambda: self._health(self._read().redis_up),
            startup=lambda: self._health(self._read().redis_up),
        )
        self._server = StatusServer(host, port, probes)

    @property
    def url(self) -> str:
        return self._server.url

    def close(self) -> None:
        self._server.close()
        self._queues.close()

    def _read(self) -> QueueReadings:
        with self._reading:
            readings = self._queues.read()
        self._is_up = readings.redis_up
        return readings

    def _health(self, is_good: bool) -> Health:
        return Health(is_good, {"redis": "up" if self._is_up else "away"})


def run_exporter(queues: QueueSet, host: str, port: int) -> None:
    """Export until SIGTERM, SIGINT or SIGHUP. Raises as `QueueExporter` does."""
    stop = SignalFlag()

    def handle(number: int, frame: FrameType | None) -> None:
        stop.set()

    for number in stop_signals():
        signal.signal(number, handle)
    exporter = QueueExporter(queues, host, port)
    logger.info("queue metrics at %s/metrics", exporter.url)
    stop.wait()
    exporter.close()
