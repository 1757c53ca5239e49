"""Dataset runs: progress of the rows, their cost, and their results."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from pagemill.monitoring.dashboards.board import Row, board
from pagemill.monitoring.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    Panel,
    heat,
    lines,
    number,
)
from pagemill.monitoring.dashboards.queries import QUEUE, Query, quantiles, rate, rate_by, total_rate


def dataset_runs() -> Dashboard:
    rows = [
        Row("Progress", _progress()),
        Row("Shape of the rows", _shape()),
        Row("What comes out", _output()),
    ]
    return board("dataset-runs", "dataset runs", "How the rows go, what they cost, and what comes out.", rows)


def _progress() -> list[Panel]:
    ended = f"max by (queue, outcome) ({rate('queue_ended_jobs_total', QUEUE)})"
    return [
        number(
            "Rows left",
            COUNT,
            Query(
                f'sum(max by (queue, state) (pagemill_queue_jobs{{{QUEUE}, state=~"waiting|delayed|running"}}))'
            ),
            about="Jobs of the chosen queues that have not ended.",
            width=6,
        ),
        number(
            "Rows per minute",
            COUNT,
            Query(f"60 * sum({ended})"),
            about="Jobs that end.",
            width=6,
        ),
        number(
            "Time left",
            SECONDS,
            Query(f"max(queue:pagemill_queue_drain_seconds:rate5m{{{QUEUE}}})"),
            about="At the rate of the last five minutes.",
            width=6,
        ),
        number(
            "Busy seconds per 1,000 rows",
            SECONDS,
            Query("pagemill_busy_seconds_per_1000_jobs:rate1h"),
            about="What a thousand rows cost, in seconds of a worker that works, over the last hour. Multiply by"
            " a worker's price per second.",
            width=6,
        ),
        lines(
            "Rows by outcome",
            PER_SECOND,
            Query(f"sum by (outcome) ({ended})", "{{outcome}}"),
            about="All workers.",
            stacked=True,
        ),
        lines(
            "Rows by worker",
            PER_SECOND,
            rate_by("instance", "jobs_finished_total"),
            about="Ends that each worker committed.",
            stacked=True,
        ),
        lines(
            "Executions per row",
            COUNT,
            Query(f"sum({rate('job_attempts_sum')}) / (sum({rate('job_attempts_count')}) > 0)", "mean"),
            about="1 when nothing is retried.",
        ),
    ]


def _shape() -> list[Panel]:
    return [
        heat("Prompt length", COUNT, "request_prompt_tokens", about="Tokens."),
        heat("Output length", COUNT, "request_generated_tokens", about="Tokens."),
        heat(
            "max_tokens",
            COUNT,
            "request_params_max_tokens",
            about="What rows ask for; unused room is not kept.",
        ),
        lines(
            "Shared prompts",
            RATIO,
            Query(
                f'sum(rate(pagemill_prompt_tokens_by_source_total{{instance=~"$worker", source="prefix_cache"}}'
                f"[$__rate_interval])) / (sum({rate('prompt_tokens_by_source_total')}) > 0)",
                "prompt tokens that were cached",
            ),
            about="Rows that begin alike share their KV blocks.",
            most=1,
        ),
        lines(
            "Tokens by source",
            TOKENS_PER_SECOND,
            rate_by("source", "prompt_tokens_by_source_total", "prompt, {{source}}"),
            total_rate("generated_tokens_total", "generated"),
            total_rate("resumed_tokens_total", "resumed"),
            about="Where the tokens of rows come from.",
        ),
        lines(
            "Size of jobs and results",
            BYTES,
            Query(quantiles("job_payload_bytes", 0.95)[0].expr, "job p95"),
            Query(quantiles("job_result_bytes", 0.95)[0].expr, "result p95"),
            about="In Redis.",
        ),
    ]


def _output() -> list[Panel]:
    return [
        lines(
            "Structured outputs",
            PER_SECOND,
            rate_by("result", "structured_outputs_total"),
            about="truncated: max_tokens came before the end. invalid: it does not match.",
            stacked=True,
        ),
        lines(
            "Grammars",
            SECONDS,
            *quantiles("grammar_compile_seconds", 0.5, 0.99),
            about="Time to compile structured_outputs; most come from the cache.",
        ),
        lines(
            "Grammar cache",
            PER_SECOND,
            rate_by("result", "grammar_cache_total"),
            about="Grammars that were compiled already.",
        ),
    ]
