"""Reliability: exactly-once completion of jobs, and the health of Redis."""

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
    lines,
    number,
)
from pagemill.monitoring.dashboards.queries import (
    QUEUE,
    WORKER,
    Query,
    gauge,
    gauge_by,
    of_queue,
    quantiles,
    rate,
    rate_by,
    total_rate,
)

CALM = [(None, "green"), (1, "red")]


def reliability() -> Dashboard:
    rows = [
        Row("The last hour", _last_hour()),
        Row("Leases and commits", _leases()),
        Row("Redis as workers see it", _redis()),
        Row("The server", _server()),
    ]
    return board("reliability", "reliability", "Is every job done once, and does Redis hold.", rows)


def _last_hour() -> list[Panel]:
    def hour(title: str, metric: str, selector: str, about: str) -> Panel:
        query = Query(f"sum(increase(pagemill_{metric}{{{selector}}}[1h]))")
        return number(title, COUNT, query, about=about, steps=CALM, width=4)

    return [
        hour("Leases lost", "leases_lost_total", WORKER, "Jobs that went to another worker."),
        hour(
            "Commits fenced",
            "result_commits_total",
            f'{WORKER}, result="fenced"',
            "Results refused as stale.",
        ),
        hour("Retries", "job_retries_total", WORKER, "Executions that ended in a retryable error."),
        hour(
            "Account errors",
            "kv_cache_accounting_errors_total",
            WORKER,
            "Contradictions in the KV block accounts: a bug.",
        ),
        hour("Steps raised", "engine_steps_failed_total", WORKER, "Their requests ran again."),
        number(
            "Keys evicted",
            COUNT,
            Query(f"max(max by (queue) (pagemill_redis_evicted_keys_total{{{QUEUE}}}))"),
            about="By the server since its start. Anything but 0 means lost jobs.",
            steps=CALM,
            width=4,
        ),
    ]


def _leases() -> list[Panel]:
    return [
        lines(
            "Leases held",
            COUNT,
            gauge_by("instance", "leases_held"),
            of_queue("queue_leases", "{{queue}}, all workers"),
            about="A queue that has more than its workers hold has lapsed ones.",
        ),
        lines(
            "Renewals",
            PER_SECOND,
            rate_by("result", "lease_renewals_total"),
            about="lost: somebody else has the job. error: Redis did not answer.",
        ),
        lines(
            "Commits",
            PER_SECOND,
            rate_by("result", "result_commits_total"),
            about="fenced: the result is discarded. already_done: repeated after a lost reply.",
        ),
        lines(
            "Time of a commit",
            SECONDS,
            *quantiles("result_commit_seconds", 0.5, 0.99),
            about="A round trip with all ends of that moment.",
        ),
        lines(
            "Checkpoints",
            PER_SECOND,
            rate_by("result", "progress_writes_total"),
            about="refused: a stale token, or a wrong offset.",
        ),
        lines(
            "Work saved and lost",
            TOKENS_PER_SECOND,
            total_rate("resumed_tokens_total", "taken over from checkpoints"),
            total_rate("redone_tokens_total", "generated again"),
            rate_by("reason", "discarded_tokens_total", "discarded: {{reason}}"),
            about="discarded: generated for nobody.",
        ),
    ]


def _redis() -> list[Panel]:
    return [
        lines(
            "Redis reachable",
            COUNT,
            gauge("redis_up"),
            about="1 while it answers that worker.",
            most=1,
        ),
        lines(
            "Round trips, p99",
            SECONDS,
            Query(
                "histogram_quantile(0.99, sum by (le, command) (rate(pagemill_redis_command_seconds_bucket"
                f"{{{WORKER}}}[$__rate_interval])))",
                "{{command}}",
            ),
            about="By the transition that they carried, one or many.",
        ),
        lines(
            "Errors and reconnects",
            PER_SECOND,
            rate_by("kind", "redis_errors_total"),
            total_rate("redis_reconnects_total", "reconnects"),
            about="Calls that failed.",
        ),
        lines(
            "Results held",
            COUNT,
            gauge("redis_result_buffer_jobs"),
            about="In memory until Redis takes them. At 1,000 the engine stops.",
        ),
        lines(
            "Bytes held",
            BYTES,
            gauge("redis_result_buffer_bytes"),
            about="In memory until Redis takes them. At 256 MB the engine stops.",
        ),
        lines(
            "Oldest running job",
            SECONDS,
            gauge("oldest_running_job_age_seconds"),
            about="Since its pull.",
        ),
    ]


def _server() -> list[Panel]:
    return [
        lines(
            "Memory",
            BYTES,
            of_queue("redis_memory_used_bytes", "{{queue}} used"),
            Query(f"max by (queue) (pagemill_redis_memory_max_bytes{{{QUEUE}}}) > 0", "{{queue}} limit"),
            of_queue("queue_memory_limit_bytes", "{{queue}} submits up to"),
            about="At the lower limit submits are refused; what is above is for running jobs.",
        ),
        lines(
            "What holds the memory",
            BYTES,
            Query(
                f"sum by (kind) (max by (queue, kind) (pagemill_queue_memory_bytes{{{QUEUE}}}))", "{{kind}}"
            ),
            about="Estimated from random keys. records: of jobs and batches; other: of other queues and software.",
            stacked=True,
        ),
        lines(
            "Refused and removed for want of memory",
            PER_SECOND,
            Query(f"max by (queue) ({rate('queue_memory_refused_total', QUEUE)})", "{{queue}} refused"),
            Query(
                f"max by (queue) ({rate('queue_memory_expired_results_total', QUEUE)})",
                "{{queue}} results removed early",
            ),
            about="Refused submits are sent again by those who wait for room, and counted again.",
        ),
        lines(
            "Waits for the disk",
            PER_SECOND,
            Query(
                f"max by (queue) ({rate('redis_aof_delayed_fsync_total', QUEUE)})", "{{queue}} delayed fsyncs"
            ),
            of_queue("redis_aof_enabled", "{{queue}} append-only file"),
            about="Writes that waited for the append-only file, and whether there is one.",
        ),
        lines(
            "Clients and replicas",
            COUNT,
            of_queue("redis_connected_clients", "{{queue}} clients"),
            of_queue("redis_blocked_clients", "{{queue}} blocked"),
            of_queue("redis_connected_replicas", "{{queue}} replicas"),
            about="blocked: idle workers wait for the doorbell.",
        ),
        lines(
            "Scrapes without a source",
            RATIO,
            rate_by("source", "scrape_source_errors_total"),
            about="The figures of that source are missing from the scrape.",
        ),
    ]
