"""An overview: progress, speed, and bottlenecks."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from pagemill.monitoring.dashboards.board import Row, board
from pagemill.monitoring.dashboards.panels import (
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    Panel,
    lines,
    number,
)
from pagemill.monitoring.dashboards.queries import (
    LANE,
    QUEUE,
    WORKER,
    Query,
    gauge,
    gauge_by,
    quantiles,
    rate,
    rate_by,
    total_rate,
)

SUCCESSES = f'{QUEUE}, outcome="succeeded"'
ENDED = f"max by (queue, outcome) ({rate('queue_ended_jobs_total', QUEUE)})"
SUCCEEDED = f"max by (queue, outcome) ({rate('queue_ended_jobs_total', SUCCESSES)})"
WAITING = f"max by (queue, model, priority) (pagemill_queue_waiting_jobs{{{LANE}}})"


def overview() -> Dashboard:
    rows = [
        Row("At a glance", _at_a_glance()),
        Row("Work", _work()),
        Row("What stands in the way", _obstacles()),
    ]
    return board("overview", "overview", "Is work done, how fast, and what stands in the way.", rows)


def _at_a_glance() -> list[Panel]:
    return [
        number(
            "Jobs waiting",
            COUNT,
            Query(f"sum({WAITING})"),
            about="Ready to be pulled, in the chosen queues for the chosen models.",
        ),
        number(
            "Oldest job",
            SECONDS,
            Query(
                f"max(max by (queue, model, priority) (pagemill_queue_oldest_job_age_seconds{{{LANE}}}))"
            ),
            about="Age of the job that has waited longest, since its submit.",
            steps=[(None, "green"), (60, "orange"), (900, "red")],
        ),
        number(
            "Time to drain",
            SECONDS,
            Query(f"max(queue:pagemill_queue_drain_seconds:rate5m{{{QUEUE}}})"),
            about="For all that is in the queue, at the rate of the last five minutes. Empty while nothing ends.",
        ),
        number(
            "KV cache in use",
            RATIO,
            Query(f"max(pagemill_kv_cache_utilization_ratio{{{WORKER}}})"),
            about="Active blocks / capacity of the fullest worker.",
            steps=[(None, "green"), (0.9, "orange"), (0.98, "red")],
        ),
        number(
            "Generated",
            TOKENS_PER_SECOND,
            total_rate("generated_tokens_total"),
            about="Output tokens per second of all chosen workers.",
        ),
        number(
            "Jobs that succeed",
            RATIO,
            Query(f"sum({SUCCEEDED}) / (sum({ENDED}) > 0)"),
            about="Of the jobs that ended.",
            steps=[(None, "red"), (0.95, "orange"), (0.99, "green")],
        ),
        number(
            "Ready workers",
            COUNT,
            Query(f'sum(max by (queue, state) (pagemill_queue_workers{{{QUEUE}, state="ready"}}))'),
            about="Live workers that pull jobs, by their own word in Redis.",
            steps=[(None, "red"), (1, "green")],
        ),
        number(
            "Alerts firing",
            COUNT,
            Query('count(ALERTS{alertname=~"Pagemill.*", alertstate="firing", severity!="info"}) or vector(0)'),
            about="Warnings and worse.",
            steps=[(None, "green"), (1, "red")],
        ),
    ]  # fmt: skip


def _work() -> list[Panel]:
    return [
        lines(
            "Jobs submitted and ended",
            PER_SECOND,
            Query(f"sum(max by (queue) ({rate('queue_submitted_jobs_total', QUEUE)}))", "submitted"),
            Query(f"sum by (outcome) ({ENDED})", "{{outcome}}"),
            about="All producers and workers of the chosen queues.",
            width=12,
        ),
        lines(
            "Tokens",
            TOKENS_PER_SECOND,
            total_rate("generated_tokens_total", "generated"),
            rate_by("source", "prompt_tokens_by_source_total", "prompt, {{source}}"),
            about="Prompt tokens by where their KV came from: computed, or the prefix cache.",
            width=12,
        ),
        lines(
            "Job time",
            SECONDS,
            *quantiles("job_e2e_seconds", 0.5, 0.95),
            about="From submit to the committed end.",
        ),
        lines(
            "Time to first token",
            SECONDS,
            *quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            about="From the engine's acceptance; the wait in the queue is not in it.",
        ),
        lines(
            "KV cache in use",
            RATIO,
            gauge("kv_cache_utilization_ratio"),
            about="Active blocks / capacity.",
            most=1,
        ),
    ]


def _obstacles() -> list[Panel]:
    return [
        lines(
            "Why no jobs are pulled",
            RATIO,
            rate_by("reason", "admission_blocked_seconds_total"),
            about="Share of time in which a worker could not pull, by what stood in the way, summed over workers.",
            stacked=True,
            width=12,
        ),
        lines(
            "Workers by state",
            COUNT,
            gauge_by("state", "worker_state"),
            about="As the workers report it.",
            stacked=True,
            width=12,
        ),
    ]
