"""The worker's part of a trace: OpenTelemetry spans for an execution that has ended.

    publish                        the producer's; its context travels in the job
    ├── queue                      submit to pull; of a job's first execution
    └── chat MODEL                 or text_completion MODEL: pull to commit
        ├── prefill                to the first token
        ├── decode                 to the last
        └── commit                 the write that ended it

Spans are created afterwards, from times that are recorded anyway: the step loop is not involved. They contain ids,
counts and settings, never any text of a prompt or an output. Without the SDK (extra `otel`) or an export address, no
spans are created.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider

logger = logging.getLogger(__name__)

ENDPOINT_VARIABLES = ("OTEL_EXPORTER_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT")
FLUSH_MS = 2000
UNREMARKABLE = frozenset({"succeeded", "released", "cancelled"})

Value = str | bool | int | float | list[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExecutionTrace:
    """One execution of a job, from the pull to the server's reply. Times are unix seconds by one clock."""

    job_id: str
    queue: str
    traceparent: str | None
    """The submission's context; without one the execution is a separate trace."""
    operation: Literal["chat", "text_completion"]
    model: str
    submitted_at: float | None
    """None: an earlier execution has already reported the time in the queue."""
    started_at: float
    first_token_at: float | None
    left_engine_at: float | None
    """The time its last token was ready; None if it never became a request."""
    commit_began: float
    commit_ended: float
    outcome: str
    error_code: str = ""
    attempt: int = 1
    attributes: Mapping[str, Value] = field(default_factory=dict)
    """The execution span's attributes, by their OpenTelemetry names."""


class Tracing:
    """Sends executions to a tracer provider. Thread-safe."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("pagemill")

    @classmethod
    def from_environment(cls, worker_id: str, version: str) -> Tracing | None:
        """Use this process's tracer provider, or one that exports to OTEL_EXPORTER_OTLP_ENDPOINT.

        None if neither exists, or if OTEL_SDK_DISABLED is set.
        """
        wanted = any(os.environ.get(name) for name in ENDPOINT_VARIABLES)
        if os.environ.get("OTEL_SDK_DISABLED", "").lower() == "true":
            return None
        try:
            from opentelemetry import trace
            from opentelemetry.sdk.trace import TracerProvider
        except ModuleNotFoundError:
            if wanted:
                logger.warning("no traces: OpenTelemetry is not installed; pip install 'pagemill[otel]'")
            return None
        provider = trace.get_tracer_provider()
        if isinstance(provider, TracerProvider):
            return cls(provider)
        return cls(_exporting_provider(worker_id, version)) if wanted else None

    def record(self, execution: ExecutionTrace) -> None:
        """Create the spans of an ended execution."""
        from opentelemetry.trace import SpanKind, Status, StatusCode, set_span_in_context

        parent = _parent(execution.traceparent)
        common: dict[str, Value] = {
            "messaging.system": "redis",
            "messaging.destination.name": execution.queue,
            "messaging.message.id": execution.job_id,
        }
        if execution.submitted_at is not None:
            # By the server's clock, whose offset is known to about a millisecond.
            queued_at = min(execution.submitted_at, execution.started_at)
            self._span("queue", parent, queued_at, execution.started_at, common)
        span = self._tracer.start_span(
            f"{execution.operation} {execution.model}",
            context=parent,
            kind=SpanKind.CONSUMER,
            start_time=_nanoseconds(execution.started_at),
            attributes={
                **common,
                "gen_ai.operation.name": execution.operation,
                "gen_ai.provider.name": "pagemill",
                "gen_ai.request.model": execution.model,
                "pagemill.attempt": execution.attempt,
                "pagemill.outcome": execution.outcome,
                **execution.attributes,
            },
        )
        if execution.outcome not in UNREMARKABLE:
            span.set_attribute("error.type", execution.error_code or execution.outcome)
            span.set_status(Status(StatusCode.ERROR, execution.error_code or execution.outcome))
        inside = set_span_in_context(span)
        if execution.left_engine_at is not None:
            prefilled_at = execution.first_token_at or execution.left_engine_at
            self._span("prefill", inside, execution.started_at, prefilled_at)
            if execution.first_token_at is not None:
                self._span("decode", inside, prefilled_at, execution.left_engine_at)
        self._span("commit", inside, execution.commit_began, execution.commit_ended, common)
        span.end(_nanoseconds(execution.commit_ended))

    def close(self) -> None:
        """Flush pending spans, with a short timeout."""
        self._provider.force_flush(FLUSH_MS)

    def _span(
        self,
        name: str,
        parent: Context | None,
        began: float,
        ended: float,
        attributes: Mapping[str, Value] | None = None,
    ) -> None:
        span = self._tracer.start_span(
            name, context=parent, start_time=_nanoseconds(began), attributes=attributes
        )
        span.end(_nanoseconds(max(began, ended)))


def _parent(traceparent: str | None) -> Context | None:
    """Return the submission's context, or an empty one, so that this thread's context is not a parent."""
    from opentelemetry.context import Context
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    if traceparent is None:
        return Context()
    return TraceContextTextMapPropagator().extract({"traceparent": traceparent}, Context())


def _exporting_provider(worker_id: str, version: str) -> TracerProvider:
    from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import BatchSpanProcessor

    named = {"service.instance.id": worker_id, "service.version": version}
    if not os.environ.get("OTEL_SERVICE_NAME"):
        named["service.name"] = "pagemill-worker"
    provider = TracerProvider(resource=Resource.create(named))
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider


def _nanoseconds(moment: float) -> int:
    return round(moment * 1e9)
