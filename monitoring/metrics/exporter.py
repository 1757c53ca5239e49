"""Serves a scrape: reads each source once and renders the snapshots as metric families."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import TypeVar

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagemill.engine.outputs import EngineStats, KVCacheStats
from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.catalogue import OF_WORKERS
from pagemill.monitoring.metrics.engine import ENGINE_METRICS
from pagemill.monitoring.metrics.kv_cache import KV_CACHE_METRICS, accounting_errors
from pagemill.monitoring.metrics.metric import Encode
from pagemill.monitoring.metrics.queue import QUEUE_METRICS
from pagemill.monitoring.metrics.scrape import SCRAPE_METRICS, ScrapeFigures, WorkerIdentity
from pagemill.monitoring.metrics.vllm_names import vllm_families
from pagemill.monitoring.metrics.worker import WORKER_METRICS
from pagemill.monitoring.queue_figures import QueueFigures

logger = logging.getLogger(__name__)

NOT_LOADED = EngineStats(KVCacheStats(*(0,) * 9))
"""Used until the model is loaded: counters and gauges exist from the first scrape, at 0."""

T = TypeVar("T")


class WorkerMetrics:
    """A worker's metrics, ready for an HTTP server. Any thread may call `render`.

    Args:
        counters: the worker's own counters.
        engine: the latest snapshot of the engine; None while the model is being loaded. Must not block.
        queue: the queue's metrics; None when unknown. May query Redis, with a separate timeout.
        identity: the worker's identity.
        vllm_names: also export vLLM's metrics under their own names.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        engine: Callable[[], EngineStats | None],
        queue: Callable[[], QueueFigures | None],
        *,
        identity: WorkerIdentity | None = None,
        vllm_names: bool = False,
    ) -> None:
        self._scraping = threading.Lock()
        self._registry = CollectorRegistry()
        identity = identity or WorkerIdentity()
        self._registry.register(_WorkerCollector(counters, engine, queue, identity, vllm_names=vllm_names))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self, encode: Encode = generate_latest) -> bytes:
        """Return the current exposition, by default in the text format."""
        with self._scraping:  # two concurrent scrapes would both count the same accounting errors
            return encode(self._registry)


class _WorkerCollector(Collector):
    """Yields every family of the catalogue from one reading of each source.

    A source that raises loses only its own values and is counted; the other families are still exported,
    because they are needed most during an outage.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        engine: Callable[[], EngineStats | None],
        queue: Callable[[], QueueFigures | None],
        identity: WorkerIdentity,
        *,
        vllm_names: bool,
    ) -> None:
        self._counters = counters
        self._engine = engine
        self._queue = queue
        self._identity = identity
        self._vllm_names = vllm_names
        self._source_errors = {"engine": 0, "queue": 0}
        self._accounting_errors = 0
        self._last_checked: EngineStats | None = None
        self._last_step = (0.0, 0.0)

    def describe(self) -> Iterator[Family]:
        yield from (metric.family(None) for metric in OF_WORKERS)

    def collect(self) -> Iterator[Family]:
        engine = self._read("engine", self._engine)
        queue = self._read("queue", self._queue)
        self._check_accounts(engine)
        stats = engine or NOT_LOADED
        for metric in KV_CACHE_METRICS:
            is_known = stats.known is None or metric.name in stats.known
            yield metric.family(stats if is_known else None)
        yield from (metric.family(stats) for metric in ENGINE_METRICS)
        # Unknown is not zero: an unreachable queue has no samples.
        yield from (metric.family(queue) for metric in QUEUE_METRICS)
        yield from (metric.family(self._counters) for metric in WORKER_METRICS)
        own = self._own_figures(engine)
        yield from (metric.family(own) for metric in SCRAPE_METRICS)
        if self._vllm_names and engine is not None:
            yield from vllm_families(engine)

    def _read(self, name: str, source: Callable[[], T | None]) -> T | None:
        try:
            return source()
        except Exception:
            self._source_errors[name] += 1
            logger.warning("the scrape continues without the %s's figures", name, exc_info=True)
            return None

    def _check_accounts(self, engine: EngineStats | None) -> None:
        """Count accounting errors once per snapshot: a scrape that sees the same one again finds nothing new."""
        if engine is None or engine is self._last_checked:
            return
        self._last_checked = engine
        for message in accounting_errors(engine.kv):
            self._accounting_errors += 1
            logger.error("the KV block accounts do not add up: %s", message)

    def _own_figures(self, engine: EngineStats | None) -> ScrapeFigures:
        return ScrapeFigures(
            identity=self._identity,
            engine=engine,
            last_step_unix=self._unix_time_of_last_step(engine.steps.last_time if engine else 0.0),
            accounting_errors=self._accounting_errors,
            source_errors=dict(self._source_errors),
        )

    def _unix_time_of_last_step(self, monotonic: float) -> float:
        """Convert once per step: a value that changed between two scrapes would look like a step."""
        if monotonic != self._last_step[0]:
            unix = time.time() - (time.monotonic() - monotonic) if monotonic else 0.0
            self._last_step = (monotonic, unix)
        return self._last_step[1]
