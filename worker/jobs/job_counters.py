"""Counters of job outcomes."""

from __future__ import annotations

from typing import Any

from pagemill.monitoring.counters import EstimateOutcome, WorkerCounters
from pagemill.producer.wire.calls.account import LETTERS
from pagemill.producer.wire.calls.estimates import Estimate
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.ending import End, JobListener
from pagemill.worker.jobs.running_job import Outcome, RunningJob


class JobCounters(JobListener):
    def __init__(self, counters: WorkerCounters, clock: ServerClock) -> None:
        self._counters = counters
        self._clock = clock

    def received(self, pulled: PulledJob) -> None:
        self._counters.jobs_received.inc("redelivered" if pulled.crashes or pulled.entries else "first")
        self._counters.payload_bytes.observe(len(pulled.payload))
        self._counters.queue_wait_seconds.observe(max(0.0, self._clock.now() - pulled.submitted_at))

    def started(self, job: RunningJob) -> None:
        if job.pulled.attempt == 1 and not (job.pulled.crashes or job.pulled.entries):
            self._counters.job_seconds.inc("queued", max(0.0, job.started_at - job.pulled.submitted_at))
        self._counters.resumed_tokens.inc(job.resumed_tokens)
        self._counters.regenerated_tokens.inc(job.regenerated_tokens)

    def lost(self, job_id: str, token: int, job: RunningJob | None) -> None:
        self._counters.leases_lost.inc()
        if job is not None:
            self._counters.discarded_tokens.inc("fenced", job.new_tokens)
            self._counters.regenerated_tokens.inc(job.unsaved_tokens)

    def ended(self, end: End, reply: str, began_at: float, error: Exception | None) -> None:
        if end.outcome in (Outcome.FAILED, Outcome.RETRIED) and end.error is not None:
            self._counters.job_failures.inc(end.error.code)
        if end.job is not None and reply not in ("fenced", "error"):
            self._count_time(end.job)
        if end.body:
            self._counters.result_bytes.observe(len(end.body))
        match reply:
            case "error":
                self._counters.commits.inc("error")
            case "already_done":
                self._counters.commits.inc("already_done")
            case "fenced":
                self._counters.commits.inc("fenced")
                self._counters.discarded_tokens.inc("fenced", end.new_tokens)
            case "released":
                self._counters.jobs_requeued.inc()
            case "lapsed":
                self._counters.leases_lost.inc()
            case "retrying":
                assert end.error is not None
                self._counters.job_retries.inc(end.error.code)  # type: ignore[arg-type]  # unknown codes count as other
            case _:
                self._committed(end, reply)

    def _count_time(self, job: RunningJob) -> None:
        for letter, milliseconds in job.times().items():
            if letter in LETTERS:
                self._counters.job_seconds.inc(LETTERS[letter], milliseconds / 1000)  # type: ignore[arg-type]
        if job.left_engine_at is not None:
            self._counters.job_seconds.inc("commit", max(0.0, self._clock.now() - job.left_engine_at))

    def _committed(self, end: End, state: Any) -> None:
        now = self._clock.now()
        self._counters.commits.inc("committed")
        self._counters.jobs_finished.inc(state)
        self._counters.attempts.observe(end.pulled.attempt)
        self._counters.e2e_seconds.observe(max(0.0, now - end.pulled.submitted_at))
        if state == "succeeded" and end.pulled.estimate:
            self._score_estimate(end.pulled.estimate, now)
        if state in ("cancelled", "expired"):
            self._counters.discarded_tokens.inc("cancelled", end.new_tokens)

    def _score_estimate(self, estimate: str, now: float) -> None:
        try:
            estimated = Estimate.read(estimate)
        except ValueError:
            return  # from another version
        after_ms = now * 1000 - estimated.start
        kept: EstimateOutcome = (
            "p50" if after_ms <= estimated.p50 else "p90" if after_ms <= estimated.p90 else "late"
        )
        self._counters.estimates.inc(kept)
        self._counters.estimate_ratio.observe(estimated.ratio(now))
