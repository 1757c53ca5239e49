"""The worker's metrics: jobs, leases, commits, admission, and its connection to Redis."""

from __future__ import annotations

from typing import get_args

from pagemill.monitoring.counters import WorkerCounters, WorkerState
from pagemill.monitoring.metrics.metric import Metric, counter, gauge, histogram, one_of

JOBS: tuple[Metric[WorkerCounters], ...] = (
    counter("jobs_received_total", "Number of jobs pulled; redelivered: an earlier execution had started.",
        lambda c: c.jobs_received.read(), "delivery"),
    counter("jobs_finished_total", "Number of jobs that this worker ended, by outcome.",
        lambda c: c.jobs_finished.read(),
        "outcome"),
    counter("job_failures_total", "Number of executions that ended with an error, including retried ones.",
        lambda c: c.job_failures.read(), "code"),
    counter("job_retries_total", "Number of executions that failed and are retried.",
        lambda c: c.job_retries.read(), "reason"),
    counter("jobs_requeued_total", "Number of jobs requeued unfinished.",
        lambda c: c.jobs_requeued.read()),
    counter("resumed_tokens_total", "Number of tokens resumed from checkpoints.",
        lambda c: c.resumed_tokens.read()),
    counter("regenerated_tokens_total",
        "Number of tokens generated again after a lost lease or an unusable checkpoint.",
        lambda c: c.regenerated_tokens.read()),
    counter("discarded_tokens_total", "Number of generated tokens that no result contains.",
        lambda c: c.discarded_tokens.read(), "reason"),
    counter("webhooks_total", "Number of delivery attempts of webhooks, by result.",
        lambda c: c.webhooks.read(), "result"),
    gauge("webhooks_pending",
        "Number of undelivered webhooks of the queue. in_flight: by this worker; later: after a "
        "failure, or by another worker.",
        lambda c: c.webhooks_pending, "state"),
    gauge("webhook_receivers_paused",
        "Number of receivers (host and port) that are paused after repeated failures.",
        lambda c: c.webhook_receivers_paused),
    gauge("oldest_running_job_age_seconds",
        "Time since the pull of the oldest running job, in seconds; 0 without any.",
        lambda c: c.oldest_running_job_s),
    histogram("job_queue_wait_seconds", "Time from a job's submission to its pull, in seconds.",
        lambda c: c.queue_wait_seconds.read()),
    histogram("job_e2e_seconds", "Time from a job's submission to its committed end, in seconds.",
        lambda c: c.e2e_seconds.read()),
    counter("job_seconds_total",
        "Time of jobs by cause, in seconds, added when an execution ends; queued: before the "
        "first one.",
        lambda c: c.job_seconds.read(), "cause"),
    counter("job_estimates_total",
        "Number of jobs with an estimate that succeeded before p50, before p90, or late.",
        lambda c: c.estimates.read(), "result"),
    histogram("job_estimate_ratio",
        "Ratio of the time from submission to success to the estimated median.",
        lambda c: c.estimate_ratio.read()),
    histogram("job_attempts", "Number of executions of a finished job.", lambda c: c.attempts.read()),
    histogram("job_payload_bytes", "Size of a pulled job, in bytes.", lambda c: c.payload_bytes.read()),
    histogram("job_result_bytes", "Size of a committed result or error, in bytes.",
        lambda c: c.result_bytes.read()),
)  # fmt: skip

LEASES_AND_COMMITS: tuple[Metric[WorkerCounters], ...] = (
    gauge("leases_held", "Number of jobs for which this worker holds a lease.", lambda c: c.leases_held),
    counter("lease_renewals_total", "Number of lease renewals by result.",
        lambda c: c.lease_renewals.read(), "result"),
    counter("leases_lost_total", "Number of leases lost before their job ended.", lambda c: c.leases_lost.read()),
    counter("result_commits_total",
        "Number of commits by result; fenced: another worker had the job.",
        lambda c: c.commits.read(), "result"),
    histogram("result_commit_seconds", "Time from sending a commit to its reply, in seconds.",
        lambda c: c.commit_seconds.read()),
    counter("progress_writes_total",
        "Number of progress and checkpoint writes by result; refused: a stale token or a wrong "
        "offset.",
        lambda c: c.progress_writes.read(), "result"),
)  # fmt: skip

ADMISSION_AND_REDIS: tuple[Metric[WorkerCounters], ...] = (
    gauge("admission_credit_sequences", "Number of free sequences at the last pull.",
        lambda c: c.credit_sequences),
    gauge("admission_credit_blocks", "Number of free KV blocks at the last pull.", lambda c: c.credit_blocks),
    counter("admission_blocked_seconds_total",
        "Time in which no job could be pulled, in seconds, by reason.",
        lambda c: c.admission_blocked_seconds.read(), "reason"),
    gauge("redis_up", "Whether Redis replies (1) or not (0).", lambda c: c.redis_up),
    histogram("redis_command_seconds",
        "Time from a call of Redis to its reply, in seconds, by transition.",
        lambda c: c.redis_seconds.read(), "command"),
    counter("redis_errors_total", "Number of failed Redis calls.", lambda c: c.redis_errors.read(), "kind"),
    counter("redis_reconnects_total", "Number of reconnections to Redis.", lambda c: c.redis_reconnects.read()),
    gauge("redis_clock_skew_seconds", "The server's clock minus this worker's, in seconds.",
        lambda c: c.redis_clock_skew_s),
    gauge("redis_result_buffer_jobs", "Number of finished results held until Redis accepts them.",
        lambda c: c.results_buffered),
    gauge("redis_result_buffer_bytes", "Size of the results held until Redis accepts them, in bytes.",
        lambda c: c.results_buffered_bytes),
)  # fmt: skip

PROCESS: tuple[Metric[WorkerCounters], ...] = (
    gauge("worker_state", "Whether the worker is in this state (1) or not (0).",
        lambda c: one_of(c.state, get_args(WorkerState)), "state"),
    counter("canaries_total",
        "Number of canaries by verdict; alone: no other worker has answered, disputed: a third "
        "must decide.",
        lambda c: c.canaries.read(), "result"),
    gauge("worker_start_timestamp_seconds", "Unix time at which the worker started, in seconds.",
        lambda c: c.started_at),
    gauge("model_load_seconds", "Time to load the model, in seconds.", lambda c: c.model_load_seconds),
)  # fmt: skip

WORKER_METRICS = JOBS + LEASES_AND_COMMITS + ADMISSION_AND_REDIS + PROCESS
