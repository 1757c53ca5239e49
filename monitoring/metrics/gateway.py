"""What `pagemill gateway` exports, for the reference page, the boards and the alerts.

The gateway writes its exposition itself, since it installs without a metrics library; a test compares the two. So
`read` has no source here: it tells the label values that there always are.
"""

from __future__ import annotations

from collections.abc import Callable

from pagemill.monitoring.metrics.metric import Metric, Reading, counter, gauge, histogram


def _always(*values: str) -> Callable[[object], Reading]:
    return lambda _: dict.fromkeys(values, 0)


GATEWAY_METRICS: tuple[Metric[object], ...] = (
    gauge("gateway_requests_in_flight", "Requests under way.", _always()),
    gauge("gateway_streams", "Answers being streamed.", _always()),
    gauge("gateway_connections", "Open connections.", _always()),
    gauge("gateway_batches_running", "Batches that this gateway holds.", _always()),
    counter(
        "gateway_requests_total",
        "Requests answered, by route, method and status; 499: the client was gone before its answer.",
        _always(),
        "route",
        "method",
        "status",
    ),
    counter(
        "gateway_refused_total",
        "Requests refused for being too many.",
        _always("busy", "queue_full", "rate"),
        "reason",
    ),
    counter("gateway_tokens_total", "Tokens that answers counted.", _always("completion", "prompt"), "kind"),
    counter(
        "gateway_cancelled_jobs_total", "Jobs cancelled because nobody waits for them any more.", _always()
    ),
    counter(
        "gateway_stream_errors_total",
        "Streams that a fault of ours ended after their head: the status of each was 200.",
        _always(),
    ),
    histogram(
        "gateway_request_seconds", "From a request's head to the end of its answer.", _always(), "route"
    ),
    histogram(
        "gateway_stream_first_token_seconds", "From the request's head to a stream's first token.", _always()
    ),
)
