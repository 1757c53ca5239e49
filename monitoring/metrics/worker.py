"""The worker's metrics: jobs, leases, commits, admission, and its connection to Redis."""

from __future__ import annotations

from typing import get_args

from pagemill.monitoring.counters import WorkerCounters, WorkerState
from pagemill.monitoring.metrics.metric import Metric, counter, gauge, histogram, one_of

JOBS: tuple[Metric[WorkerCounters], ...] = (
    counter("jobs_received_total", "Jobs pulled; redelivered: an earlier execution had started.",
        lambda c: c.jobs_received.read(), "delivery"),
    counter("jobs_finished_total", "Jobs ended by this worker.", lambda c: c.jobs_finished.read(),
        "outcome"),
    counter("job_failures_total", "Executions that ended with an error, including retried ones.",
        lambda c: c.job_failures.read(), "code"),
    counter("job_retries_total", "Executions to be retried.", lambda c: c.job_retries.read(), "reason"),
    counter("jobs_requeued_total", "Jobs requeued unfinished.",
        lambda c: c.jobs_requeued.read()),
    counter("resumed_tokens_total", "Tokens resumed from checkpoints.",
        lambda c: c.resumed_tokens.read()),
    counter("regenerated_tokens_total",
        "Tokens to be generated again after a lost lease or an unusable checkpoint.",
        lambda c: c.regenerated_tokens.read()),
    counter("discarded_tokens_total", "Generated tokens that no result contains.",
        lambda c: c.discarded_tokens.read(), "reason"),
    counter("webhooks_total", "Delivery attempts of webhooks.", lambda c: c.webhooks.read(), "result"),
    gauge("webhooks_pending",
        "Undelivered webhooks of the queue. in_flight: by this worker; later: after a failure, or by another worker.",
        lambda c: c.webhooks_pending, "state"),
    gauge("webhook_receivers_paused",
        "Receivers (host and port) that are not called for a while, since they failed repeatedly.",
        lambda c: c.webhook_receivers_paused),
    gauge("oldest_running_job_age_seconds",
        "Time since the pull of the oldest running job; 0 without any.",
        lambda c: c.oldest_running_job_s),
    histogram("job_queue_wait_seconds", "Time from a job's submission to its pull.",
        lambda c: c.queue_wait_seconds.read()),
    histogram("job_e2e_seconds", "Time from a job's submission to its committed end.", lambda c: c.e2e_seconds.read()),
    counter("job_seconds_total",
        "Time of jobs by cause, added when an execution ends; queued: before the first one.",
        lambda c: c.job_seconds.read(), "cause"),
    counter("job_estimates_total",
        "Jobs with an estimate that succeeded before p50, before p90, or late.",
        lambda c: c.estimates.read(), "result"),
    histogram("job_estimate_ratio",
        "Time from submission to success / estimated median.",
        lambda c: c.estimate_ratio.read()),
    histogram("job_attempts", "Executions that a finished job took.", lambda c: c.attempts.read()),
    histogram("job_payload_bytes", "Size of the jobs pulled.", lambda c: c.payload_bytes.read()),
    histogram("job_result_bytes", "Size of the results and errors committed.",
        lambda c: c.result_bytes.read()),
)  # fmt: skip

LEASES_AND_COMMITS: tuple[Metric[WorkerCounters], ...] = (
    gauge("leases_held", "Jobs that this worker holds a lease for.", lambda c: c.leases_held),
    counter("lease_renewals_total", "Renewals by result.", lambda c: c.lease_renewals.read(), "result"),
    counter("leases_lost_total", "Leases lost before their job ended.", lambda c: c.leases_lost.read()),
    counter("result_commits_total",
        "Commits by result; fenced: another worker had the job.",
        lambda c: c.commits.read(), "result"),
    histogram("result_commit_seconds", "Time of a commit.", lambda c: c.commit_seconds.read()),
    counter("progress_writes_total",
        "Progress and checkpoint writes by result; refused: a stale token or a wrong offset.",
        lambda c: c.progress_writes.read(), "result"),
)  # fmt: skip

ADMISSION_AND_REDIS: tuple[Metric[WorkerCounters], ...] = (
    gauge("admission_credit_sequences", "Free sequences at the last pull.",
        lambda c: c.credit_sequences),
    gauge("admission_credit_blocks", "Free KV blocks at the last pull.", lambda c: c.credit_blocks),
    counter("admission_blocked_seconds_total",
        "Time in which no job could be pulled, by reason.",
        lambda c: c.admission_blocked_seconds.read(), "reason"),
    gauge("redis_up", "1 while Redis answers.", lambda c: c.redis_up),
    histogram("redis_command_seconds",
        "Round-trip time to Redis by transition.",
        lambda c: c.redis_seconds.read(), "command"),
    counter("redis_errors_total", "Failed Redis calls.", lambda c: c.redis_errors.read(), "kind"),
    counter("redis_reconnects_total", "Reconnections to Redis.", lambda c: c.redis_reconnects.read()),
    gauge("redis_clock_skew_seconds", "The server's clock minus this worker's.",
        lambda c: c.redis_clock_skew_s),
    gauge("redis_result_buffer_jobs", "Finished results held until Redis accepts them.",
        lambda c: c.results_buffered),
    gauge("redis_result_buffer_bytes", "Bytes of results held until Redis accepts them.",
        lambda c: c.results_buffered_bytes),
)  # fmt: skip

PROCESS: tuple[Metric[WorkerCounters], ...] = (
    gauge("worker_state", "1 for the current state of the worker.",
        lambda c: one_of(c.state, get_args(WorkerState)), "state"),
    counter("canaries_total",
        "Canaries by verdict; alone: no other worker answered yet, disputed: a third must decide.",
        lambda c: c.canaries.read(), "result"),
    gauge("worker_start_timestamp_seconds", "Time at which the worker started.", lambda c: c.started_at),
    gauge("model_load_seconds", "Time to load the model.", lambda c: c.model_load_seconds),
)  # fmt: skip

WORKER_METRICS = JOBS + LEASES_AND_COMMITS + ADMISSION_AND_REDIS + PROCESS
