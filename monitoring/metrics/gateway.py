"""The counters of `pagemill gateway`, and their export.

Labels are bounded: routes as the router writes them, methods and statuses, never a tenant, a model or a path
that a client chose.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from prometheus_client import generate_latest
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from pagemill.engine.outputs import Histogram
from pagemill.monitoring.metrics.metric import Encode, Metric, counter, gauge, histogram

BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


class GatewayMetrics(Collector):
    """Plain counters, updated only on the event loop."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.streams = 0
        self.connections = 0
        self.running_batches = 0
        self.requests: Counter[tuple[str, ...]] = Counter()
        """Requests by route, method and status; 499 if the client disconnected before its response."""
        self.cancelled_jobs = 0
        self.stream_errors = 0
        self.refused = Counter(busy=0, queue_full=0, rate=0, quota=0, late=0)
        self.tokens = Counter(completion=0, prompt=0)
        self.seconds: dict[str, Histogram] = {}
        self.first_token_seconds = Histogram(BUCKETS)

    def finished(self, route: str, method: str, status: int, seconds: float) -> None:
        self.requests[route, method, str(status)] += 1
        self.seconds.setdefault(route, Histogram(BUCKETS)).observe(seconds)

    def collect(self) -> Iterator[Family]:
        return (metric.family(self) for metric in GATEWAY_METRICS)

    def exposition(self, encode: Encode = generate_latest) -> bytes:
        return encode(self)


GATEWAY_METRICS: tuple[Metric[GatewayMetrics], ...] = (
    gauge("gateway_requests_in_flight", "Number of requests in progress.", lambda g: g.in_flight),
    gauge("gateway_streams", "Number of responses being streamed.", lambda g: g.streams),
    gauge("gateway_connections", "Number of open connections.", lambda g: g.connections),
    gauge("gateway_batches_running", "Number of batches that this gateway runs.", lambda g: g.running_batches),
    counter("gateway_requests_total",
        "Number of requests answered; status 499: the client had disconnected.",
        lambda g: g.requests, "route", "method", "status"),
    counter("gateway_refused_total", "Number of requests rejected because of a limit.",
        lambda g: g.refused, "reason"),
    counter("gateway_tokens_total", "Number of tokens in the usage of responses.", lambda g: g.tokens, "kind"),
    counter("gateway_cancelled_jobs_total", "Number of jobs cancelled because their clients disconnected.",
        lambda g: g.cancelled_jobs),
    counter("gateway_stream_errors_total",
        "Number of streams that an internal error ended after the status 200.",
        lambda g: g.stream_errors),
    histogram("gateway_request_seconds", "Time from a request's headers to the end of its response, in seconds.",
        lambda g: {route: seconds.snapshot() for route, seconds in g.seconds.items()}, "route"),
    histogram("gateway_stream_first_token_seconds",
        "Time from a request's headers to a stream's first token, in seconds.",
        lambda g: g.first_token_seconds.snapshot()),
)  # fmt: skip
