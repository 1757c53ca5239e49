"""The metrics of any number of queues: the response of `pagemill exporter` to a scrape.

The same tables as in a worker's exposition, so that a dashboard can apply `max by (queue, ...)` to both and shows one
value.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagemill.monitoring.metrics.metric import Encode, Metric, counter, gauge
from pagemill.monitoring.metrics.queue import QUEUE_METRICS
from pagemill.monitoring.queue_figures import QueueFigures


@dataclass(frozen=True, slots=True)
class QueueReadings:
    """One scrape's readings."""

    queues: Sequence[QueueFigures]
    """The queues that could be read."""
    redis_up: bool
    errors: int
    """Number of readings that failed since startup."""
    version: str = field(default="")


EXPORTER_METRICS: tuple[Metric[QueueReadings], ...] = (
    gauge("redis_up", "Whether Redis replies (1) or not (0).", lambda r: r.redis_up),
    counter(
        "scrape_source_errors_total",
        "Number of scrapes in which a source failed.",
        lambda r: {"queue": r.errors},
        "source",
    ),
    gauge(
        "build_info", "Running version in a label; value is always 1.", lambda r: {r.version: 1}, "version"
    ),
)


class QueueExposition:
    """Renders the queues' metrics on any thread; each call of `render` calls `read` once."""

    def __init__(self, read: Callable[[], QueueReadings]) -> None:
        self._scraping = threading.Lock()
        self._registry = CollectorRegistry()
        self._registry.register(_QueueCollector(read))

    def render(self, encode: Encode = generate_latest) -> bytes:
        with self._scraping:
            return encode(self._registry)


class _QueueCollector(Collector):
    def __init__(self, read: Callable[[], QueueReadings]) -> None:
        self._read = read

    def describe(self) -> Iterator[Family]:
        yield from (metric.family(None) for metric in QUEUE_METRICS)
        yield from (metric.family(None) for metric in EXPORTER_METRICS)

    def collect(self) -> Iterator[Family]:
        readings = self._read()
        for metric in QUEUE_METRICS:
            family = metric.family(None)
            for figures in readings.queues:
                family.samples += metric.family(figures).samples
            yield family
        yield from (metric.family(readings) for metric in EXPORTER_METRICS)
