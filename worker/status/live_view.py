"""The worker's running jobs for the live page, without prompt text unless it is enabled."""

from __future__ import annotations

from pagemill.monitoring.live.feed import JobRow
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.job_table import JobTable
from pagemill.worker.jobs.running_job import RunningJob

PROMPT_CHARS = 160


class LiveView:
    """Reads the job table; safe on any thread."""

    def __init__(self, table: JobTable, clock: ServerClock, *, show_prompts: bool) -> None:
        self._table = table
        self._clock = clock
        self._show_prompts = show_prompts

    def jobs(self) -> list[JobRow]:
        """Return the rows, oldest execution first."""
        now = self._clock.now()
        running = sorted(self._table.running(), key=lambda job: job.started_at)
        return [self._row(job, now) for job in running if not job.has_left_engine]

    def _row(self, job: RunningJob, now: float) -> JobRow:
        return JobRow(
            id=job.job_id,
            token=job.token,
            phase=job.phase,
            prompt_tokens_done=job.prompt_tokens_done,
            prompt_tokens=len(job.prompt_token_ids),
            generated_tokens=job.generated_tokens,
            max_tokens=job.max_tokens * job.params.n,
            age_s=round(max(0.0, now - job.started_at), 1),
            attempt=job.pulled.attempt,
            crashes=job.pulled.crashes,
            priority=job.job.priority,
            prompt=_beginning(job) if self._show_prompts else None,
        )


def _beginning(job: RunningJob) -> str:
    """Return the start of the prompt; for a chat, of its last message."""
    if job.job.prompt is not None:
        text = job.job.prompt
    elif job.job.messages:
        text = job.job.messages[-1].description()
    else:
        text = f"{len(job.prompt_token_ids)} token ids"
    return text if len(text) <= PROMPT_CHARS else text[: PROMPT_CHARS - 1] + "…"
