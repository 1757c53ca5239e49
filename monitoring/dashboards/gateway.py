"""The gateway: HTTP requests, their answers, and rejections."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from pagemill.monitoring.dashboards.board import Row, board, gateways
from pagemill.monitoring.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    Panel,
    heat,
    lines,
)
from pagemill.monitoring.dashboards.queries import GATEWAY, Query, gauge, quantiles, rate, rate_by, total_rate

CLIENTS = f'{GATEWAY}, route!~"/healthz|/readyz|/metrics|/openapi.json"'
"""Clients' requests, without the probes and scrapes that would dilute every ratio."""
FAILED = f'{CLIENTS}, status=~"5.."'


def gateway() -> Dashboard:
    rows = [Row("Requests", _requests()), Row("Streams", _streams()), Row("Load", _load())]
    about = "What is asked over HTTP, how it is answered, and who is turned away."
    return board("gateway", "gateway", about, rows, gateways())


def _requests() -> list[Panel]:
    return [
        lines(
            "Answers by status",
            PER_SECOND,
            rate_by("status", "gateway_requests_total", selector=CLIENTS),
            about="499: the client was gone before its answer. Probes and scrapes are left out.",
            stacked=True,
        ),
        lines(
            "Answers by route",
            PER_SECOND,
            rate_by("route", "gateway_requests_total", selector=CLIENTS),
            about="(none): refused before it had a route, or no route of ours.",
            stacked=True,
        ),
        lines(
            "Share of errors",
            RATIO,
            Query(
                f"sum by (instance) ({rate('gateway_requests_total', FAILED)})"
                f" / sum by (instance) ({rate('gateway_requests_total', CLIENTS)})",
                "{{instance}}",
            ),
            about="Answers with a status of 500 and above. Empty while there is none.",
        ),
        lines(
            "Time to answer by route, p95",
            SECONDS,
            Query(
                "histogram_quantile(0.95,"
                f" sum by (route, le) ({rate('gateway_request_seconds_bucket', CLIENTS)}))",
                "{{route}}",
            ),
            about="From the head of a request to the end of its answer; of a stream, to its end.",
        ),
        lines(
            "Refused",
            PER_SECOND,
            rate_by("reason", "gateway_refused_total", selector=GATEWAY),
            about="rate: a key's own limit. queue_full: the queue's. busy: more than the gateway takes at once.",
            stacked=True,
        ),
        lines(
            "Cancelled jobs",
            PER_SECOND,
            total_rate("gateway_cancelled_jobs_total", "cancelled", selector=GATEWAY),
            about="Jobs that were ended because nobody waited for them any more.",
        ),
    ]


def _streams() -> list[Panel]:
    return [
        heat(
            "First token",
            SECONDS,
            "gateway_stream_first_token_seconds",
            about="From a request's head to the first token of its stream: the wait in the queue is in it.",
            selector=GATEWAY,
        ),
        lines(
            "First token",
            SECONDS,
            *quantiles("gateway_stream_first_token_seconds", 0.5, 0.95, 0.99, selector=GATEWAY),
            about="From a request's head to the first token of its stream.",
        ),
        lines(
            "Streams, and those that broke off",
            PER_SECOND,
            total_rate("gateway_stream_first_token_seconds_count", "begun", selector=GATEWAY),
            total_rate("gateway_stream_errors_total", "ended by an error", selector=GATEWAY),
            about="A stream that breaks off has been answered 200 already: only this tells of it.",
        ),
    ]


def _load() -> list[Panel]:
    return [
        lines(
            "Under way",
            COUNT,
            gauge("gateway_requests_in_flight", "{{instance}} requests", selector=GATEWAY),
            gauge("gateway_streams", "{{instance}} streams", selector=GATEWAY),
            gauge("gateway_batches_running", "{{instance}} batches", selector=GATEWAY),
            about="Requests beyond --max-in-flight are refused as busy.",
        ),
        lines(
            "Connections",
            COUNT,
            gauge("gateway_connections", selector=GATEWAY),
            about="Open ones. Beyond --max-connections the one that has waited longest for a request is closed.",
        ),
        lines(
            "Tokens",
            TOKENS_PER_SECOND,
            rate_by("kind", "gateway_tokens_total", selector=GATEWAY),
            about="As the answers count them; jobs of batches are not in it.",
        ),
    ]
