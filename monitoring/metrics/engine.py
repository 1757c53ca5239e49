"""The engine's metrics except the KV cache's: steps, requests and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pagemill.engine.outputs import EngineStats, FinishReason, PromptSource, StructuredResult, WaitReason
from pagemill.monitoring.metrics.adapters import ADAPTERS
from pagemill.monitoring.metrics.media import MEDIA
from pagemill.monitoring.metrics.metric import Metric, Number, counter, each, engine_histogram, gauge

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
PROMPT_SOURCES: tuple[PromptSource, ...] = ("computed", "prefix_cache")
STRUCTURED_RESULTS: tuple[StructuredResult, ...] = get_args(StructuredResult)


def _waiting(stats: EngineStats) -> Mapping[str, Number]:
    scheduler = stats.scheduler
    return {reason: scheduler.waiting * (reason == scheduler.waiting_for) for reason in WAIT_REASONS}


def _steps_by_mode(stats: EngineStats) -> Mapping[str, Number]:
    return {"graph": stats.steps.replayed, "eager": stats.steps.finished - stats.steps.replayed}


def _grammar_cache(stats: EngineStats) -> Mapping[str, Number]:
    return {"hit": stats.grammars.hits, "miss": stats.grammars.misses}


STEPS: tuple[Metric[EngineStats], ...] = (
    counter("engine_steps_total", "Engine steps finished.", lambda s: s.steps.finished),
    counter("engine_steps_failed_total", "Engine steps that failed.", lambda s: s.scheduler.steps_failed),
    counter("engine_graph_steps_total",
        "Engine steps, replayed from a CUDA graph or eager.", _steps_by_mode,
        "mode"),
    counter("engine_busy_seconds_total", "Time in engine steps; 1 - rate() is the idle fraction.",
        lambda s: s.steps.busy_seconds),
    counter("engine_computed_tokens_total", "Tokens computed by the model, including recomputed ones.",
        lambda s: s.steps.computed_tokens),
    counter("engine_sharing_rows_total",
        "Decode rows that shared their first blocks with another row.", lambda s: s.steps.sharing_rows),
    counter("engine_discarded_tokens_total",
        "Sampled tokens discarded because their sequence had ended a step before.",
        lambda s: s.scheduler.discarded_tokens),
    counter("draft_tokens_total", "Tokens drafted.",
        lambda s: s.scheduler.drafted_tokens),
    counter("draft_tokens_accepted_total",
        "Drafted tokens accepted.",
        lambda s: s.scheduler.accepted_tokens),
    engine_histogram("engine_step_seconds",
        "Time of a step by phase (schedule, prepare, forward, sample, output) and kind (prefill: no row decodes,"
        " decode: all do, mixed).", "step_seconds", "phase", "kind"),
    engine_histogram("engine_step_tokens", "Tokens in a step by kind.", "step_tokens", "kind"),
    engine_histogram("engine_batch_token_budget_ratio", "Tokens in a step / max_num_batched_tokens.",
        "step_budget_use"),
    engine_histogram("engine_batch_size", "Sequences in a step.", "batch_size"),
    gauge("engine_replaced_kernels",
        "Kernels that failed their check at startup and are replaced by plain torch.",
        lambda s: s.loaded.replaced_kernels),
    counter("invalid_logits_total", "Rows whose logits were not finite.",
        lambda s: s.scheduler.invalid_logits),
    gauge("device_memory_bytes", "The model's memory by use, where known.",
        lambda s: each(s.memory_bytes, s.memory_bytes), "use"),
)  # fmt: skip

REQUESTS: tuple[Metric[EngineStats], ...] = (
    gauge("requests_running", "Sequences in the batch.", lambda s: s.scheduler.running),
    gauge("requests_waiting",
        "Requests that wait in the engine, by what the first one lacks.", _waiting, "reason"),
    gauge("max_num_seqs", "Rows of the batch.", lambda s: s.loaded.max_num_seqs),
    counter("requests_completed_total", "Requests by how they ended.",
        lambda s: each(s.requests.finished, FINISH_REASONS), "finish_reason"),
    engine_histogram("time_to_first_token_seconds",
        "Time from the engine's acceptance of a request to its first token.", "time_to_first_token_seconds"),
    engine_histogram("inter_token_latency_seconds", "Time between two tokens of a sequence.",
        "inter_token_latency_seconds"),
    engine_histogram("time_per_output_token_seconds",
        "Mean time between the tokens of a request.",
        "time_per_output_token_seconds"),
    engine_histogram("request_e2e_seconds", "Time from the engine's acceptance of a request to its last token.",
        "request_seconds"),
    engine_histogram("request_wait_seconds", "Time from the engine's acceptance of a request to its first step.",
        "request_wait_seconds"),
    engine_histogram("request_prefill_seconds", "Time from a request's first step to its first token.",
        "request_prefill_seconds"),
    engine_histogram("request_decode_seconds", "Time from a request's first token to its last.",
        "request_decode_seconds"),
    engine_histogram("request_inference_seconds", "Time from a request's first step to its last token.",
        "request_inference_seconds"),
    engine_histogram("request_prompt_tokens", "Prompt length of requests.", "prompt_tokens"),
    engine_histogram("request_generated_tokens", "Tokens generated per request.", "generated_tokens"),
    engine_histogram("request_longest_sample_tokens", "Tokens of a request's longest sample.",
        "longest_sample_tokens"),
    engine_histogram("request_params_n", "Samples per request (n).", "request_samples"),
    engine_histogram("request_params_max_tokens", "The max_tokens of requests.", "request_max_tokens"),
)  # fmt: skip

TOKENS: tuple[Metric[EngineStats], ...] = (
    counter("prompt_tokens_total", "Prompt tokens of accepted requests.", lambda s: s.requests.prompt_tokens),
    counter("prompt_tokens_by_source_total",
        "Prompt tokens of started requests, by source of their KV.",
        lambda s: each(s.requests.prompt_tokens_by_source, PROMPT_SOURCES), "source"),
    counter("pooled_texts_total",
        "Texts that got a vector (embed), labels (classify) or a score (rerank).",
        lambda s: dict(s.requests.pooled_texts.items()), "task"),
    counter("generated_tokens_total", "Tokens generated.", lambda s: s.requests.generated_tokens),
    counter("structured_outputs_total",
        "Samples with structured_outputs that ended; truncated: at max_tokens.",
        lambda s: each(s.requests.structured_outputs, STRUCTURED_RESULTS), "result"),
    engine_histogram("grammar_compile_seconds", "Time to compile structured_outputs.",
        "grammar_compile_seconds"),
    counter("grammar_cache_total", "Grammar requests that found a compiled grammar (hit) or not (miss).",
        _grammar_cache, "result"),
)  # fmt: skip

ENGINE_METRICS = STEPS + REQUESTS + TOKENS + ADAPTERS + MEDIA
