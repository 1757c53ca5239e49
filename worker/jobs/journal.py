"""Reports every job's transitions on this worker: a log line each, the live page's list of ends, and spans.

Lines carry ids as fields (`job_id`, `token`, `attempt`), never any text of a prompt or an output.
"""

from __future__ import annotations

import logging
from typing import Any

from pagemill.monitoring.live.job_ends import JobEnd, JobEnds
from pagemill.monitoring.tracing import Tracing
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.execution_trace import execution_trace
from pagemill.worker.jobs.final_write import FinalWrite
from pagemill.worker.jobs.running_job import RunningJob

logger = logging.getLogger(__name__)

_WARNINGS = {"retrying", "fenced", "lost", "lapsed", "dead"}
_SHOWN = {"retrying": "retried", "lapsed": "lost"}
_MESSAGES = {
    "released": "job handed back",
    "lapsed": "job may have killed the device; its lease ends",
    "retrying": "job will be retried",
    "fenced": "job belongs to another worker by now; its end here is discarded",
    "already_done": "job's end was recorded before",
    "error": "the server refuses the job's end; its lease will lapse",
}


class Journal:
    """Called by admission and by the reporter, each on its own thread."""

    def __init__(self, queue: str, ends: JobEnds, clock: ServerClock, tracing: Tracing | None) -> None:
        self._queue = queue
        self._ends = ends
        self._clock = clock
        self._tracing = tracing

    def started(self, job: RunningJob) -> None:
        """Report that the engine has received the job."""
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

    def lost(self, pulled_id: str, token: int, job: RunningJob | None) -> None:
        """Report that another worker has the lease; `job` is None if it had not started."""
        tokens = job.generated_tokens if job is not None else 0
        logger.warning(
            "job lost its lease; its work here is discarded",
            extra={"job_id": pulled_id, "token": token, "tokens": tokens},
        )
        self._ends.add(JobEnd(pulled_id, "lost", tokens, self._age(job)))

    def settled(
        self, write: FinalWrite, outcome: str, commit_began: float, error: Exception | None = None
    ) -> None:
        """Report the server's answer to an execution's last write.

        Args:
            outcome: the terminal state that was recorded, or released, lapsed, retrying, fenced, already_done,
                error.
            commit_began: when the write was sent, by the server's clock.
        """
        if self._tracing is not None:
            self._trace(self._tracing, write, outcome, commit_began)
        job = write.job
        tokens = job.generated_tokens if job is not None else 0
        took_s = self._age(job)
        details: dict[str, Any] = {"outcome": outcome, "tokens": tokens, "took_s": round(took_s, 3)}
        if write.code:
            details |= {"code": write.code, "reason": write.reason}
        if error is not None:
            details |= {"kind": write.kind, "error": str(error)}
        level = logging.INFO
        if outcome in _WARNINGS:
            level = logging.WARNING
        elif outcome == "error":
            level = logging.ERROR
        logger.log(level, _MESSAGES.get(outcome, f"job {outcome}"), extra=_ids(write.pulled) | details)
        if outcome != "already_done":
            shown = _SHOWN.get(outcome, outcome)
            self._ends.add(JobEnd(write.job_id, shown, tokens, took_s, write.code, write.reason))

    def _trace(self, tracing: Tracing, write: FinalWrite, outcome: str, commit_began: float) -> None:
        try:
            tracing.record(execution_trace(self._queue, write, outcome, commit_began, self._clock.now()))
        except Exception:
            logger.exception("an execution could not be traced")  # a trace is never worth losing a job

    def _age(self, job: RunningJob | None) -> float:
        return max(0.0, self._clock.now() - job.started_at) if job is not None else 0.0


def _ids(pulled: PulledJob) -> dict[str, Any]:
    return {"job_id": pulled.job_id, "token": pulled.token, "attempt": pulled.attempt}
