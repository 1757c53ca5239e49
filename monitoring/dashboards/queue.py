"""The queue: what waits, for how long, and what becomes of it."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.board import Row, board
from monitoring.dashboards.panels import (
    COUNT,
    LANE,
    PER_SECOND,
    QUEUE,
    RATIO,
    SECONDS,
    WORKER,
    Query,
    heat,
    lines,
    quantiles,
    rate,
)


def queue() -> Dashboard:
    backlog = [
        lines(
            "Waiting by priority",
            COUNT,
            Query(
                f"sum by (priority) (max by (queue, model, priority) (pagemill_queue_waiting_jobs{{{LANE}}}))",
                "{{priority}}",
            ),
            about="Jobs ready to be pulled.",
            stacked=True,
        ),
        lines(
            "Waiting by model",
            COUNT,
            Query(
                f"sum by (model) (max by (queue, model, priority) (pagemill_queue_waiting_jobs{{{LANE}}}))",
                "{{model}}",
            ),
            about="Jobs ready to be pulled.",
            stacked=True,
        ),
        lines(
            "Oldest job by priority",
            SECONDS,
            Query(
                "max by (queue, model, priority)"
                f" (pagemill_queue_oldest_job_age_seconds{{{LANE}}})",
                "{{queue}} {{model}} {{priority}}",
            ),
            about="Since its submit.",
        ),
        lines(
            "Jobs by state",
            COUNT,
            Query(f"sum by (state) (max by (queue, state) (pagemill_queue_jobs{{{QUEUE}}}))", "{{state}}"),
            about="delayed: jobs for later, retries included. dead: kept until they are purged.",
        ),
        lines(
            "Submitted and ended",
            PER_SECOND,
            Query(f"sum(max by (queue) ({rate('queue_submitted_jobs_total', QUEUE)}))", "submitted"),
            Query(f"sum(max by (queue, outcome) ({rate('queue_ended_jobs_total', QUEUE)}))", "ended"),
            about="When the first stays above the second, the queue grows.",
        ),
        lines(
            "Time to drain",
            SECONDS,
            Query(f"queue:pagemill_queue_drain_seconds:rate5m{{{QUEUE}}}", "{{queue}}"),
            Query(
                f"max by (queue) (pagemill_queue_estimated_drain_seconds{{{QUEUE}}})",
                "{{queue}}, workers' own estimate",
            ),
            about="For all that is in the queue, at the present rate. Empty while nothing ends.",
        ),
    ]  # fmt: skip
    flow = [
        heat(
            "Wait in the queue",
            SECONDS,
            "job_queue_wait_seconds",
            about="From submit to pull, of the jobs pulled then.",
        ),
        lines(
            "Wait in the queue",
            SECONDS,
            *quantiles("job_queue_wait_seconds", 0.5, 0.95, 0.99),
            about="From submit to pull.",
        ),
        lines(
            "Ended by outcome",
            PER_SECOND,
            Query(
                f"sum by (outcome) (max by (queue, outcome) ({rate('queue_ended_jobs_total', QUEUE)}))",
                "{{outcome}}",
            ),
            about="All workers of the chosen queues.",
            stacked=True,
        ),
        lines(
            "First and redelivered",
            PER_SECOND,
            Query(f"sum by (delivery) ({rate('jobs_received_total')})", "{{delivery}}"),
            about="redelivered: an earlier execution had started.",
        ),
        lines(
            "Retries",
            PER_SECOND,
            Query(f"sum by (reason) ({rate('job_retries_total')})", "{{reason}}"),
            about="Executions that ended in a retryable error.",
        ),
        lines(
            "Failures by code",
            PER_SECOND,
            Query(f"sum by (code) ({rate('job_failures_total')}) > 0", "{{code}}"),
            about="Executions that ended with an error; those that are retried included. Only codes that occur.",
        ),
    ]
    pulling = [
        lines(
            "Why no jobs are pulled",
            RATIO,
            Query(f"sum by (reason) ({rate('admission_blocked_seconds_total')})", "{{reason}}"),
            about="Share of time in which a worker could not pull, summed over workers. kv and rows: it is full,"
            " which is as it should be under load.",
            stacked=True,
        ),
        lines(
            "Room for jobs",
            COUNT,
            Query(f"pagemill_admission_credit_sequences{{{WORKER}}}", "{{instance}} sequences"),
            Query(f"pagemill_admission_credit_blocks{{{WORKER}}}", "{{instance}} blocks"),
            about="What the last pull asked for at most.",
        ),
        lines(
            "Workers by state, and paused",
            COUNT,
            Query(f"sum by (state) (max by (queue, state) (pagemill_queue_workers{{{QUEUE}}}))", "{{state}}"),
            Query(f"max by (queue) (pagemill_queue_paused{{{QUEUE}}})", "{{queue}} paused"),
            about="Live workers by their own word in Redis.",
        ),
    ]
    rows = [Row("Backlog", backlog), Row("Flow", flow), Row("Pulling", pulling)]
    return board("queue", "queue", "What waits, for how long, and what becomes of it.", rows)
