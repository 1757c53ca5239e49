"""The queue: waiting jobs, their delays, and their outcomes."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from pagemill.monitoring.dashboards.board import Row, board
from pagemill.monitoring.dashboards.panels import COUNT, PER_SECOND, RATIO, SECONDS, Panel, heat, lines
from pagemill.monitoring.dashboards.queries import (
    LANE,
    QUEUE,
    WORKER,
    Query,
    gauge,
    of_queue,
    quantiles,
    rate,
    rate_by,
)

BY_P50 = 'result="p50"'
BY_P90 = 'result=~"p50|p90"'


def queue() -> Dashboard:
    rows = [
        Row("Backlog", _backlog()),
        Row("Flow", _flow()),
        Row("Pulling", _pulling()),
        Row("Rollouts", _rollouts()),
    ]
    return board("queue", "queue", "What waits, for how long, and what becomes of it.", rows)


def _backlog() -> list[Panel]:
    return [
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
            of_queue("queue_estimated_drain_seconds", "{{queue}}, workers' own estimate"),
            about="For all that is in the queue, at the present rate. Empty while nothing ends.",
        ),
    ]  # fmt: skip


def _flow() -> list[Panel]:
    return [
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
            "Promises kept",
            RATIO,
            Query(
                f"sum({rate('job_promises_total', WORKER + ', ' + BY_P50)}) / sum({rate('job_promises_total')})",
                "by p50",
            ),
            Query(
                f"sum({rate('job_promises_total', WORKER + ', ' + BY_P90)}) / sum({rate('job_promises_total')})",
                "by p90",
            ),
            about="Of the jobs that succeeded and were promised an end. Half should end by p50, nine of ten by p90.",
            most=1,
        ),
        lines(
            "Promised and actual time",
            RATIO,
            *quantiles("job_promise_ratio", 0.1, 0.5, 0.9),
            about="From submit to end, over the time that was promised to half of the jobs: 100 % is as promised.",
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
            rate_by("delivery", "jobs_received_total"),
            about="redelivered: an earlier execution had started.",
        ),
        lines(
            "Retries",
            PER_SECOND,
            rate_by("reason", "job_retries_total"),
            about="Executions that ended in a retryable error.",
        ),
        lines(
            "Failures by code",
            PER_SECOND,
            Query(f"sum by (code) ({rate('job_failures_total')}) > 0", "{{code}}"),
            about="Executions that ended with an error; those that are retried included. Only codes that occur.",
        ),
    ]


def _pulling() -> list[Panel]:
    return [
        lines(
            "Why no jobs are pulled",
            RATIO,
            rate_by("reason", "admission_blocked_seconds_total"),
            about="Share of time in which a worker could not pull, summed over workers. kv and rows: it is full,"
            " which is as it should be under load.",
            stacked=True,
        ),
        lines(
            "Room for jobs",
            COUNT,
            gauge("admission_credit_sequences", "{{instance}} sequences"),
            gauge("admission_credit_blocks", "{{instance}} blocks"),
            about="What the last pull asked for at most.",
        ),
        lines(
            "Workers by state, and paused",
            COUNT,
            Query(f"sum by (state) (max by (queue, state) (pagemill_queue_workers{{{QUEUE}}}))", "{{state}}"),
            of_queue("queue_paused", "{{queue}} paused"),
            about="Live workers by their own word in Redis.",
        ),
    ]


def _rollouts() -> list[Panel]:
    def by_side(expr: str, legend: str = "{{model}} {{side}}") -> Query:
        return Query(f"max by (queue, model, side) ({expr})", legend)

    executions, failures = (rate(f"queue_rollout_{name}_total", QUEUE) for name in ("executions", "failures"))
    return [
        lines(
            "Failures by side",
            RATIO,
            Query(
                f"max by (queue, model, side) ({failures}) / max by (queue, model, side) ({executions})",
                "{{model}} {{side}}",
            ),
            about="Of the executions that ended; hand-backs, cancels and deadlines aside.",
        ),
        lines(
            "Run time by side",
            SECONDS,
            Query(
                f"max by (queue, model, side, quantile) (pagemill_queue_rollout_run_seconds{{{QUEUE}}})",
                "{{model}} {{side}} {{quantile}}",
            ),
            about="From pull to commit, median and 90th percentile of the latest 256.",
        ),
        lines(
            "Executions by side",
            PER_SECOND,
            by_side(executions),
            about="Those that ended in success, in an error or with their worker.",
        ),
        lines(
            "Share and agreement",
            RATIO,
            Query(
                f"max by (queue, model) (pagemill_queue_rollout_share_ratio{{{QUEUE}}})", "{{model}} share"
            ),
            Query(
                f"max by (queue, model) (pagemill_queue_rollout_agreement_ratio{{{QUEUE}}})",
                "{{model}} agreement",
            ),
            about="The canary's share of the jobs, and the share of equal outputs when they were last compared.",
        ),
        lines(
            "Workers by side",
            COUNT,
            by_side(f"pagemill_queue_rollout_workers{{{QUEUE}}}"),
            about="Live ones. A side without any is served by the other.",
        ),
        lines(
            "State",
            COUNT,
            Query(
                f"max by (queue, model, state) (pagemill_queue_rollout_state{{{QUEUE}}}) == 1",
                "{{model}} {{state}}",
            ),
            about="Open, halted (by a command or for its failures), taken back or ended.",
        ),
    ]
