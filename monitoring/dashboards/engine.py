"""The engine: its steps, its requests, its latencies, its device."""

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
)
from pagemill.monitoring.dashboards.queries import (
    WORKER,
    Query,
    gauge_by,
    quantiles,
    rate,
    rate_by,
    total,
    total_rate,
)


def engine() -> Dashboard:
    rows = [
        Row("Requests", _requests()),
        Row("Latency", _latency()),
        Row("Steps", _steps()),
        Row("Device", _device(), is_collapsed=True),
    ]
    return board("engine", "engine", "Steps, requests, latencies and the device.", rows)


def _requests() -> list[Panel]:
    return [
        lines(
            "Running and waiting",
            COUNT,
            total("requests_running", "running"),
            gauge_by("reason", "requests_waiting", "waiting for {{reason}}"),
            total("requests_swapped", "swapped"),
            total("max_num_seqs", "rows"),
            about="Sequences that run, and requests inside the engine that wait, by what the first of them lacks.",
        ),
        lines(
            "Tokens",
            TOKENS_PER_SECOND,
            total_rate("generated_tokens_total", "generated"),
            total_rate("engine_computed_tokens_total", "through the model"),
            total_rate("engine_discarded_tokens_total", "sampled too late"),
            total_rate("draft_tokens_total", "drafted"),
            total_rate("draft_tokens_accepted_total", "drafts accepted"),
            about="Through the model: prompts, drafts, generated and redone ones. An accepted draft saves a step.",
        ),
        lines(
            "Ended by reason",
            PER_SECOND,
            rate_by("finish_reason", "requests_completed_total"),
            about="Requests per second.",
            stacked=True,
        ),
    ]


def _latency() -> list[Panel]:
    return [
        lines(
            "Time to first token",
            SECONDS,
            *quantiles("time_to_first_token_seconds", 0.5, 0.95, 0.99),
            about="From the engine's acceptance of a request.",
        ),
        lines(
            "Between two tokens",
            SECONDS,
            *quantiles("inter_token_latency_seconds", 0.5, 0.95, 0.99),
            about="Of a sequence; every token counts.",
        ),
        lines(
            "Per output token",
            SECONDS,
            *quantiles("time_per_output_token_seconds", 0.5, 0.95, 0.99),
            about="The mean of each request; every request counts once.",
        ),
        lines(
            "A request's phases, p95",
            SECONDS,
            *(
                Query(quantiles(f"request_{phase}_seconds", 0.95)[0].expr, phase)
                for phase in ("wait", "prefill", "decode", "inference", "e2e")
            ),
            about="wait: until its first step. inference: prefill and decode. e2e: all of it.",
        ),
        heat("Time to first token", SECONDS, "time_to_first_token_seconds", about="All requests."),
        heat("Between two tokens", SECONDS, "inter_token_latency_seconds", about="All tokens."),
    ]


def _steps() -> list[Panel]:
    phase_seconds = f"sum by (phase) ({rate('engine_step_seconds_sum')})"
    return [
        lines(
            "Step time by phase",
            SECONDS,
            Query(
                f"{phase_seconds} / on () group_left () (sum({rate('engine_steps_total')}) > 0)", "{{phase}}"
            ),
            about="Mean seconds per step. On a GPU phases of different steps overlap.",
            stacked=True,
        ),
        lines(
            "Forward pass by kind of step",
            SECONDS,
            *(
                Query(
                    f"histogram_quantile({q}, sum by (le, kind) (rate(pagemill_engine_step_seconds_bucket"
                    f'{{{WORKER}, phase="forward"}}[$__rate_interval])))',
                    f"{{{{kind}}}} p{round(q * 100)}",
                )
                for q in (0.5, 0.95)
            ),
            about="prefill: no row decodes. decode: all do.",
        ),
        lines(
            "Steps",
            PER_SECOND,
            rate_by("mode", "engine_graph_steps_total"),
            total_rate("engine_steps_failed_total", "raised"),
            about="graph: replayed from a CUDA graph.",
        ),
        heat("Sequences in a step", COUNT, "engine_batch_size", about="How full the batch is."),
        heat(
            "Use of the token budget",
            RATIO,
            "engine_batch_token_budget_ratio",
            about="Tokens in a step / max_num_batched_tokens.",
        ),
        lines(
            "Tokens in steps by kind",
            TOKENS_PER_SECOND,
            rate_by("kind", "engine_step_tokens_sum"),
            about="Prompt tokens come in prefill and mixed steps.",
            stacked=True,
        ),
        lines(
            "Busy",
            RATIO,
            Query(f"{rate('engine_busy_seconds_total')}", "{{instance}}"),
            about="Share of time inside steps; the rest had nothing to do.",
            most=1,
        ),
        lines(
            "Age of the last step",
            SECONDS,
            Query(
                f"(time() - pagemill_engine_last_step_timestamp_seconds{{{WORKER}}})"
                f" * (pagemill_requests_running{{{WORKER}}} > bool 0)",
                "{{instance}}",
            ),
            about="0 while nothing runs. More than a minute: the engine hangs.",
        ),
        lines(
            "NaN",
            PER_SECOND,
            rate_by("instance", "invalid_logits_total"),
            about="Rows whose logits were not finite. Such a request fails alone.",
        ),
    ]


def _device() -> list[Panel]:
    return [
        lines(
            "Memory by use",
            BYTES,
            gauge_by("use", "device_memory_bytes"),
            about="As far as the engine knows it.",
            stacked=True,
        ),
        lines(
            "Process memory",
            BYTES,
            Query(f"process_resident_memory_bytes{{{WORKER}}}", "{{instance}}"),
            about="Of the worker's process.",
        ),
        lines(
            "GPU busy",
            "percent",
            Query("DCGM_FI_DEV_GPU_UTIL", "{{Hostname}} GPU {{gpu}}"),
            about="From the DCGM exporter; empty without one.",
            most=100,
        ),
    ]
