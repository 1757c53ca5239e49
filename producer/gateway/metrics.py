"""The gateway's figures in Prometheus' text format.

Written here in full: prometheus_client belongs to monitoring, and a gateway installs without it. Labels are bounded:
routes as they are written in the router, statuses, never a tenant, a model or a path that a client chose. Names and
help texts are those of monitoring/metrics/gateway.py; a test compares them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from dataclasses import dataclass, field
from itertools import accumulate

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0, 600.0)


@dataclass(slots=True)
class _Histogram:
    counts: list[int] = field(default_factory=lambda: [0] * (len(BUCKETS) + 1))
    total: float = 0.0

    def observe(self, value: float) -> None:
        self.counts[bisect_left(BUCKETS, value)] += 1
        self.total += value

    def lines(self, name: str, labels: str) -> list[str]:
        bounds = [*map(str, BUCKETS), "+Inf"]
        sums = list(accumulate(self.counts))
        rows = [
            f'{name}_bucket{{{labels}le="{bound}"}} {count}'
            for bound, count in zip(bounds, sums, strict=True)
        ]
        bare = f"{{{labels.rstrip(',')}}}" if labels else ""
        return [*rows, f"{name}_sum{bare} {self.total!r}", f"{name}_count{bare} {sums[-1]}"]


class GatewayMetrics:
    """Plain counters, touched on the event loop only."""

    def __init__(self) -> None:
        self.in_flight = 0
        self.streams = 0
        self.connections = 0
        self.running_batches = 0
        self.requests: Counter[tuple[str, str, int]] = Counter()
        """By route, method and status; 499 where the client went away before its answer."""
        self.cancelled_jobs = 0
        self.stream_errors = 0
        self.refused: Counter[str] = Counter({"rate": 0, "queue_full": 0, "busy": 0})
        self.tokens: Counter[str] = Counter({"prompt": 0, "completion": 0})
        self._seconds: dict[str, _Histogram] = {}
        self._first_token = _Histogram()

    def finished(self, route: str, method: str, status: int, seconds: float) -> None:
        self.requests[route, method, status] += 1
        self._seconds.setdefault(route, _Histogram()).observe(seconds)

    def first_token(self, seconds: float) -> None:
        self._first_token.observe(seconds)

    def exposition(self) -> bytes:
        out: list[str] = []
        for name, help_text, value in (
            ("requests_in_flight", "Requests under way.", self.in_flight),
            ("streams", "Answers being streamed.", self.streams),
            ("connections", "Open connections.", self.connections),
            ("batches_running", "Batches that this gateway holds.", self.running_batches),
        ):
            out += _head(f"gateway_{name}", help_text, "gauge")
            out.append(f"pagemill_gateway_{name} {value}")
        out += _head(
            "gateway_requests_total",
            "Requests answered, by route, method and status; 499: the client was gone before its answer.",
            "counter",
        )
        out += [
            f'pagemill_gateway_requests_total{{route="{route}",method="{method}",status="{status}"}} {count}'
            for (route, method, status), count in sorted(self.requests.items())
        ]
        out += _head("gateway_refused_total", "Requests refused for being too many.", "counter")
        out += [
            f'pagemill_gateway_refused_total{{reason="{k}"}} {v}' for k, v in sorted(self.refused.items())
        ]
        out += _head("gateway_tokens_total", "Tokens that answers counted.", "counter")
        out += [f'pagemill_gateway_tokens_total{{kind="{k}"}} {v}' for k, v in sorted(self.tokens.items())]
        for name, help_text, count in (
            (
                "cancelled_jobs_total",
                "Jobs cancelled because nobody waits for them any more.",
                self.cancelled_jobs,
            ),
            (
                "stream_errors_total",
                "Streams that a fault of ours ended after their head: the status of each was 200.",
                self.stream_errors,
            ),
        ):
            out += _head(f"gateway_{name}", help_text, "counter")
            out.append(f"pagemill_gateway_{name} {count}")
        out += _head(
            "gateway_request_seconds", "From a request's head to the end of its answer.", "histogram"
        )
        for route, histogram in sorted(self._seconds.items()):
            out += histogram.lines("pagemill_gateway_request_seconds", f'route="{route}",')
        name = "gateway_stream_first_token_seconds"
        out += _head(name, "From the request's head to a stream's first token.", "histogram")
        out += self._first_token.lines(f"pagemill_{name}", "")
        return ("\n".join(out) + "\n").encode()


def _head(name: str, help_text: str, kind: str) -> list[str]:
    return [f"# HELP pagemill_{name} {help_text}", f"# TYPE pagemill_{name} {kind}"]
