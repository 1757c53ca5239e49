"""A job's history as a list of events."""

from __future__ import annotations

from collections.abc import Iterator

from pagemill.producer.wire.calls.history import Execution, JobHistory

Event = tuple[float | None, str, str, str]
"""Time (unix seconds; None: in the future), event, worker and reason."""

_MEANINGS = {
    "released": "requeued",
    "lost": "its lease lapsed",
    "crashed": "its lease lapsed, nothing had come of it",
}


def timeline(job: JobHistory) -> Iterator[Event]:
    """Yield the job's past events in order, then the expected ones."""
    yield job.created_at, "submitted", "", ""
    for run in job.executions:
        yield run.started_at, "started", run.worker or "", f"attempt {run.attempt}"
        if run.ended_at is not None:
            yield run.ended_at, run.outcome, run.worker or "", _reason(run)
    ended_itself = bool(job.executions) and job.executions[-1].outcome == job.state
    if job.finished_at is not None and not ended_itself:
        yield job.finished_at, job.state, "", _error(job)
    elif job.state == "delayed":
        yield job.due_at, "due", "", ""
    elif job.state == "queued":
        yield None, "waiting", "", ""
    if job.finished_at is None and job.deadline is not None:
        yield job.deadline, "deadline", "", ""


def _reason(run: Execution) -> str:
    return _MEANINGS.get(run.outcome, "") or ": ".join(filter(None, (run.code, run.message)))


def _error(job: JobHistory) -> str:
    return f"{job.error.code}: {job.error.message}" if job.error is not None else ""
