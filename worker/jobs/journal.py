"""Reports each job's transitions on this worker: log lines, the live page's list of ended jobs, and spans.

Lines carry ids as fields (`job_id`, `token`, `attempt`), never any text of a prompt or an output.
"""

from __future__ import annotations

import logging
from typing import Any

from pagemill.monitoring.live.job_ends import JobEnd, JobEnds
from pagemill.monitoring.tracing import Tracing
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.ending import End, JobListener
from pagemill.worker.jobs.execution_trace import execution_trace
from pagemill.worker.jobs.running_job import RunningJob

logger = logging.getLogger(__name__)

_WARNINGS = {"retrying", "fenced", "lost", "lapsed", "dead"}
_SHOWN = {"retrying": "retried", "lapsed": "lost"}
_MESSAGES = {
    "released": "job requeued",
    "lapsed": "job may have killed the device; its lease ends",
    "retrying": "job will be retried",
    "fenced": "job belongs to another worker by now; its end here is discarded",
    "already_done": "job's end was recorded before",
    "error": "the server rejects the job's result; its lease will expire",
}


class Journal(JobListener):
    """Reports transitions in the log, on the live page, and in traces."""

    def __init__(self, queue: str, ends: JobEnds, clock: ServerClock, tracing: Tracing | None) -> None:
        self._queue = queue
        self._ends = ends
        self._clock = clock
        self._tracing = tracing

    def started(self, job: RunningJob) -> None:
        if job.unusable is not None:
            logger.warning(
                "job %s: starts from its prompt, its checkpoint of %d tokens can't be used (%s)",
                job.job_id,
                job.regenerated_tokens,
                job.unusable,
            )
        lost_by = job.pulled.taken_over_from
        logger.log(
            logging.WARNING if lost_by else logging.INFO,
            "job taken over" if lost_by else "job running",
            extra=_ids(job.pulled)
            | ({"lost_by": lost_by} if lost_by else {})
            | {
                "model": job.job.model,
                "prompt_tokens": len(job.prompt_token_ids),
                "resumed_tokens": job.resumed_tokens,
                "waited_s": round(max(0.0, job.started_at - job.pulled.submitted_at), 3),
            },
        )

    def lost(self, job_id: str, token: int, job: RunningJob | None) -> None:
        tokens = job.generated_tokens if job is not None else 0
        logger.warning(
            "job lost its lease; its work here is discarded",
            extra={"job_id": job_id, "token": token, "tokens": tokens},
        )
        self._ends.add(JobEnd(job_id, "lost", tokens, self._age(job)))

    def ended(self, end: End, reply: str, began_at: float, error: Exception | None) -> None:
        if self._tracing is not None:
            self._trace(self._tracing, end, reply, began_at)
        job = end.job
        tokens = job.generated_tokens if job is not None else 0
        took_s = self._age(job)
        details: dict[str, Any] = {"outcome": reply, "tokens": tokens, "took_s": round(took_s, 3)}
        code, reason = (end.error.code, end.error.message) if end.error is not None else ("", "")
        if code:
            details |= {"code": code, "reason": reason}
        if error is not None:
            details |= {"kind": end.outcome.value, "error": str(error)}
        level = logging.INFO
        if reply in _WARNINGS:
            level = logging.WARNING
        elif reply == "error":
            level = logging.ERROR
        logger.log(level, _MESSAGES.get(reply, f"job {reply}"), extra=_ids(end.pulled) | details)
        if reply != "already_done":
            self._ends.add(JobEnd(end.job_id, _SHOWN.get(reply, reply), tokens, took_s, code, reason))

    def _trace(self, tracing: Tracing, end: End, reply: str, began_at: float) -> None:
        try:
            tracing.record(execution_trace(self._queue, end, reply, began_at, self._clock.now()))
        except Exception:
            logger.exception("an execution could not be traced")  # a trace is not worth losing a job

    def _age(self, job: RunningJob | None) -> float:
        return max(0.0, self._clock.now() - job.started_at) if job is not None else 0.0


def _ids(pulled: PulledJob) -> dict[str, Any]:
    return {"job_id": pulled.job_id, "token": pulled.token, "attempt": pulled.attempt}
