"""Trace data of an execution: times, settings and counts, without its prompt and output."""

from __future__ import annotations

import json

from pagemill.monitoring.tracing import ExecutionTrace, Value
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.worker.jobs.ending import End
from pagemill.worker.jobs.running_job import RunningJob


def execution_trace(
    queue: str, end: End, outcome: str, commit_began: float, commit_ended: float
) -> ExecutionTrace:
    """Describe the execution that ended in `end`; the commit's times are by the server's clock."""
    pulled, job = end.pulled, end.job
    asked = _fields(pulled) if job is None else {}
    is_first = pulled.attempt == 1 and not pulled.crashes and not pulled.entries
    started_at = job.started_at if job is not None else commit_began
    first_token_at = None
    if job is not None and job.sent_at is not None and job.ttft_s is not None:
        first_token_at = job.sent_at + job.ttft_s
    return ExecutionTrace(
        job_id=pulled.job_id,
        queue=queue,
        traceparent=job.job.traceparent if job is not None else _text(asked, "traceparent"),
        operation="chat" if "messages" in asked or (job and job.job.messages) else "text_completion",
        model=job.job.model if job is not None else _text(asked, "model") or "",
        submitted_at=pulled.submitted_at if is_first else None,
        started_at=started_at,
        first_token_at=first_token_at,
        left_engine_at=job.left_engine_at if job is not None else None,
        commit_began=commit_began,
        commit_ended=commit_ended,
        outcome=outcome,
        error_code=end.error.code if end.error is not None else "",
        attempt=pulled.attempt,
        attributes=_attributes(job) if job is not None else {},
    )


def _attributes(job: RunningJob) -> dict[str, Value]:
    params = job.params
    reasons = [sample.finish_reason for sample in job.samples if sample.finish_reason is not None]
    attributes: dict[str, Value] = {
        "gen_ai.request.max_tokens": job.max_tokens,
        "gen_ai.request.temperature": params.temperature,
        "gen_ai.request.top_p": params.top_p,
        "gen_ai.request.choice.count": params.n,
        "gen_ai.response.id": job.job_id,
        "gen_ai.response.model": job.job.model,
        "gen_ai.response.finish_reasons": [str(reason) for reason in reasons],
        "gen_ai.usage.input_tokens": len(job.prompt_token_ids),
        "gen_ai.usage.output_tokens": job.generated_tokens,
        "pagemill.resumed_tokens": job.resumed_tokens,
        "pagemill.tenant": job.job.tenant,
        "pagemill.priority": job.job.priority,
    }
    if params.seed is not None:
        attributes["gen_ai.request.seed"] = params.seed
    return attributes


def _fields(pulled: PulledJob) -> dict[str, object]:
    """Read fields from the payload of a job that was rejected before it became a request."""
    try:
        fields = json.loads(pulled.payload)
    except (ValueError, RecursionError):
        return {}
    return fields if isinstance(fields, dict) else {}


def _text(fields: dict[str, object], name: str) -> str | None:
    value = fields.get(name)
    return value[:128] if isinstance(value, str) else None
