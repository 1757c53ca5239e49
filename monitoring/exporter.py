"""One scrape: read each source once, turn the snapshots into families, write them out."""

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
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from engine.outputs import EngineStats
from monitoring.counters import WorkerCounters
from monitoring.engine_metrics import ENGINE_METRICS, NOT_LOADED, accounting_errors
from monitoring.metrics import PREFIX
from monitoring.queue_figures import QueueFigures
from monitoring.queue_metrics import QUEUE_METRICS
from monitoring.worker_metrics import WORKER_METRICS

logger = logging.getLogger(__name__)

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

T = TypeVar("T")


class WorkerMetrics:
    """A worker's metrics, ready for an HTTP server. Any thread may call `render`.

    Args:
        counters: what the worker counts.
        engine: the latest snapshot of the engine; None while the model is being loaded. Must not block.
        queue: the queue's figures; None when they are not known. May ask Redis, with a timeout of its own.
        version: the worker's version, for the `build_info` label.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        engine: Callable[[], EngineStats | None],
        queue: Callable[[], QueueFigures | None],
        *,
        version: str = "",
    ) -> None:
        self._scraping = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_WorkerCollector(counters, engine, queue, version))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)
        GCCollector(registry=self._registry)

    def render(self) -> bytes:
        """The exposition of this moment, in the text format that `CONTENT_TYPE` names."""
        with self._scraping:
            return generate_latest(self._registry)


class _WorkerCollector(Collector):
    """Yields every family of the catalogue from one reading of each source.

    A source that raises costs its own values and is counted; the other families are exported all the same,
    because an outage is when somebody looks at them.
    """

    def __init__(
        self,
        counters: WorkerCounters,
        engine: Callable[[], EngineStats | None],
        queue: Callable[[], QueueFigures | None],
        version: str,
    ) -> None:
        self._counters = counters
        self._engine = engine
        self._queue = queue
        self._version = version
        self._source_errors = {"engine": 0, "queue": 0}
        self._accounting_errors = 0
        self._last_checked: EngineStats | None = None
        self._last_step = (0.0, 0.0)

    def describe(self) -> Iterator[Family]:
        yield from (metric.family(None) for metric in ENGINE_METRICS)
        yield from (metric.family(None) for metric in QUEUE_METRICS)
        yield from (metric.family(None) for metric in WORKER_METRICS)

    def collect(self) -> Iterator[Family]:
        engine = self._read("engine", self._engine)
        queue = self._read("queue", self._queue)
        yield from (metric.family(engine or NOT_LOADED) for metric in ENGINE_METRICS)
        yield from self._derived_from_engine(engine)
        # Unknown is not zero: a queue that cannot be asked has no samples.
        yield from (metric.family(queue) for metric in QUEUE_METRICS)
        yield from (metric.family(self._counters) for metric in WORKER_METRICS)
        yield self._own_errors()
        yield _info("build_info", "The version that runs.", {"version": self._version})

    def _read(self, name: str, source: Callable[[], T | None]) -> T | None:
        try:
            return source()
        except Exception:
            self._source_errors[name] += 1
            logger.warning("the scrape goes on without the %s's figures", name, exc_info=True)
            return None

    def _derived_from_engine(self, engine: EngineStats | None) -> Iterator[Family]:
        if engine is not None and engine is not self._last_checked:
            self._last_checked = engine
            for message in accounting_errors(engine.kv):
                self._accounting_errors += 1
                logger.error("the KV block accounts do not add up: %s", message)
        yield CounterMetricFamily(
            PREFIX + "kv_cache_accounting_errors_total",
            "Contradictions found in snapshots of the KV block pool. Anything above 0 is a bug.",
            self._accounting_errors,
        )
        yield GaugeMetricFamily(
            PREFIX + "engine_last_step_timestamp_seconds",
            "When the last engine step finished; 0 before the first.",
            self._unix_time_of_last_step(engine.last_step_time if engine else 0.0),
        )
        if engine is not None:
            labels = {
                "model": engine.model,
                "device": engine.device,
                "tier": engine.tier,
                "fingerprint": engine.fingerprint,
            }
            yield _info("engine_info", "What the engine runs.", labels)

    def _unix_time_of_last_step(self, monotonic: float) -> float:
        """Converted once per step: a value that moved between two scrapes would look like a step."""
        if monotonic != self._last_step[0]:
            unix = time.time() - (time.monotonic() - monotonic) if monotonic else 0.0
            self._last_step = (monotonic, unix)
        return self._last_step[1]

    def _own_errors(self) -> Family:
        family = CounterMetricFamily(
            PREFIX + "scrape_source_errors_total",
            "Scrapes that went on without a source's figures.",
            labels=["source"],
        )
        for source, count in self._source_errors.items():
            family.add_metric([source], count)
        return family


def _info(name: str, help: str, labels: dict[str, str]) -> Family:
    family = GaugeMetricFamily(PREFIX + name, help, labels=list(labels))
    family.add_metric(list(labels.values()), 1)
    return family
