"""The producer's part in a trace: a `publish` span, whose context travels in the job as `traceparent`.

Active only if the application has loaded OpenTelemetry and set up its SDK; otherwise it is not imported.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from pagemill.producer.wire.schema.job import Job


@contextmanager
def publishing(
    queue: str, given: object = None, fields: Mapping[str, Any] | None = None
) -> Iterator[str | None]:
    """Open a span around a submission; yields the traceparent for its jobs, None if there is no tracing.

    The parent is the job's own traceparent (in `fields`, or in the Job or mapping that was `given`), or the
    application's current span. An error is recorded on the span.
    """
    api = sys.modules.get("opentelemetry.trace")
    if api is None:
        yield None
        return
    from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

    propagator = TraceContextTextMapPropagator()
    own = _own_traceparent(given, fields or {})
    parent = propagator.extract({"traceparent": own}) if own is not None else None
    attributes = {
        "messaging.system": "redis",
        "messaging.operation.name": "publish",
        "messaging.destination.name": queue,
    }
    tracer = api.get_tracer("pagemill")
    with tracer.start_as_current_span(
        "publish", context=parent, kind=api.SpanKind.PRODUCER, attributes=attributes
    ):
        carrier: dict[str, str] = {}
        propagator.inject(carrier)
        yield carrier.get("traceparent")


def traced(job: object, traceparent: str) -> Any:
    """Return a batch's row with the batch's context, unless it has its own or is not a job."""
    if isinstance(job, Job):
        return job if job.traceparent else job.model_copy(update={"traceparent": traceparent})
    if isinstance(job, Mapping) and job.get("traceparent") is None:
        return {**job, "traceparent": traceparent}
    return job


def _own_traceparent(given: object, fields: Mapping[str, Any]) -> str | None:
    """Return the caller's traceparent, unchecked: it is validated with the rest of the job."""
    own = fields.get("traceparent")
    if own is None and isinstance(given, Mapping):
        own = given.get("traceparent")
    elif own is None and isinstance(given, Job):
        own = given.traceparent
    return own if isinstance(own, str) else None
