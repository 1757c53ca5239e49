"""Reliability: is every job done once, and does Redis hold."""

from __future__ import annotations

from grafana_foundation_sdk.models.dashboard import Dashboard

from monitoring.dashboards.board import Row, board
from monitoring.dashboards.panels import (
    BYTES,
    COUNT,
    PER_SECOND,
    QUEUE,
    RATIO,
    SECONDS,
    TOKENS_PER_SECOND,
    WORKER,
    Panel,
    Query,
    lines,
    number,
    quantiles,
    rate,
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
            Query(f"sum by (instance) (pagemill_leases_held{{{WORKER}}})", "{{instance}}"),
            Query(f"max by (queue) (pagemill_queue_leases{{{QUEUE}}})", "{{queue}}, all workers"),
            about="A queue that has more than its workers hold has lapsed ones.",
        ),
        lines(
            "Renewals",
            PER_SECOND,
            Query(f"sum by (result) ({rate('lease_renewals_total')})", "{{result}}"),
            about="lost: somebody else has the job. error: Redis did not answer.",
        ),
        lines(
            "Commits",
            PER_SECOND,
            Query(f"sum by (result) ({rate('result_commits_total')})", "{{result}}"),
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
            Query(f"sum by (result) ({rate('progress_writes_total')})", "{{result}}"),
            about="refused: a stale token, or a wrong offset.",
        ),
        lines(
            "Work saved and lost",
            TOKENS_PER_SECOND,
            Query(f"sum({rate('resumed_tokens_total')})", "taken over from checkpoints"),
            Query(f"sum({rate('redone_tokens_total')})", "generated again"),
            Query(f"sum by (reason) ({rate('discarded_tokens_total')})", "discarded: {{reason}}"),
            about="discarded: generated for nobody.",
        ),
    ]


def _redis() -> list[Panel]:
    return [
        lines(
            "Redis reachable",
            COUNT,
            Query(f"pagemill_redis_up{{{WORKER}}}", "{{instance}}"),
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
            Query(f"sum by (kind) ({rate('redis_errors_total')})", "{{kind}}"),
            Query(f"sum({rate('redis_reconnects_total')})", "reconnects"),
            about="Calls that failed.",
        ),
        lines(
            "Results held",
            COUNT,
            Query(f"pagemill_redis_result_buffer_jobs{{{WORKER}}}", "{{instance}}"),
            about="In memory until Redis takes them. At 1,000 the engine stops.",
        ),
        lines(
            "Bytes held",
            BYTES,
            Query(f"pagemill_redis_result_buffer_bytes{{{WORKER}}}", "{{instance}}"),
            about="In memory until Redis takes them. At 256 MB the engine stops.",
        ),
        lines(
            "Oldest running job",
            SECONDS,
            Query(f"pagemill_oldest_running_job_age_seconds{{{WORKER}}}", "{{instance}}"),
            about="Since its pull.",
        ),
    ]


def _server() -> list[Panel]:
    return [
        lines(
            "Memory",
            BYTES,
            Query(f"max by (queue) (pagemill_redis_memory_used_bytes{{{QUEUE}}})", "{{queue}} used"),
            Query(f"max by (queue) (pagemill_redis_memory_max_bytes{{{QUEUE}}}) > 0", "{{queue}} limit"),
            about="When it is full, submits are refused; running jobs still commit.",
        ),
        lines(
            "Waits for the disk",
            PER_SECOND,
            Query(
                f"max by (queue) ({rate('redis_aof_delayed_fsync_total', QUEUE)})", "{{queue}} delayed fsyncs"
            ),
            Query(f"max by (queue) (pagemill_redis_aof_enabled{{{QUEUE}}})", "{{queue}} append-only file"),
            about="Writes that waited for the append-only file, and whether there is one.",
        ),
        lines(
            "Clients and replicas",
            COUNT,
            Query(f"max by (queue) (pagemill_redis_connected_clients{{{QUEUE}}})", "{{queue}} clients"),
            Query(f"max by (queue) (pagemill_redis_blocked_clients{{{QUEUE}}})", "{{queue}} blocked"),
            Query(f"max by (queue) (pagemill_redis_connected_replicas{{{QUEUE}}})", "{{queue}} replicas"),
            about="blocked: idle workers wait for the doorbell.",
        ),
        lines(
            "Scrapes without a source",
            RATIO,
            Query(f"sum by (source) ({rate('scrape_source_errors_total')})", "{{source}}"),
            about="The figures of that source are missing from the scrape.",
        ),
    ]
