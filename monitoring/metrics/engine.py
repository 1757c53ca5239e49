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
    counter("engine_steps_total", "Number of engine steps finished.", lambda s: s.steps.finished),
    counter("engine_steps_failed_total", "Number of engine steps that failed.", lambda s: s.scheduler.steps_failed),
    counter("engine_graph_steps_total",
        "Number of engine steps, replayed from a CUDA graph or eager.", _steps_by_mode,
        "mode"),
    counter("engine_busy_seconds_total", "Time spent in engine steps, in seconds. Idle fraction: 1 - rate().",
        lambda s: s.steps.busy_seconds),
    counter("engine_computed_tokens_total", "Number of tokens computed by the model, including recomputed ones.",
        lambda s: s.steps.computed_tokens),
    counter("engine_sharing_rows_total",
        "Number of decode rows that shared their first blocks with another row.", lambda s: s.steps.sharing_rows),
    counter("engine_discarded_tokens_total",
        "Number of sampled tokens discarded because their sequence had ended a step before.",
        lambda s: s.scheduler.discarded_tokens),
    counter("draft_tokens_total", "Number of tokens drafted.",
        lambda s: s.scheduler.drafted_tokens),
    counter("draft_tokens_accepted_total",
        "Number of drafted tokens accepted.",
        lambda s: s.scheduler.accepted_tokens),
    engine_histogram("engine_step_seconds",
        "Time of a step, in seconds, by phase (schedule, prepare, forward, sample, output) and "
        "kind (prefill: no row decodes, decode: all do, mixed).", "step_seconds", "phase", "kind"),
    engine_histogram("engine_step_tokens", "Number of tokens in a step, by kind.", "step_tokens", "kind"),
    engine_histogram("engine_batch_token_budget_ratio",
        "Fraction of max_num_batched_tokens that a step uses, 0 to 1.",
        "step_budget_use"),
    engine_histogram("engine_batch_size", "Number of sequences in a step.", "batch_size"),
    gauge("engine_replaced_kernels",
        "Number of kernels that failed their check at startup and are replaced by plain torch.",
        lambda s: s.loaded.replaced_kernels),
    gauge("engine_lost_graphs", "Whether CUDA graphs could not be captured at startup (1) or not (0).",
        lambda s: int(s.loaded.has_lost_graphs)),
    counter("invalid_logits_total", "Number of rows whose logits were not finite.",
        lambda s: s.scheduler.invalid_logits),
    gauge("device_memory_bytes", "Memory of the model by use, in bytes, where known.",
        lambda s: each(s.memory_bytes, s.memory_bytes), "use"),
)  # fmt: skip

REQUESTS: tuple[Metric[EngineStats], ...] = (
    gauge("requests_running", "Number of sequences in the batch.", lambda s: s.scheduler.running),
    gauge("requests_waiting",
        "Number of requests that wait in the engine, by the resource that the first one lacks.", _waiting, "reason"),
    gauge("max_num_seqs", "Number of rows of the batch.", lambda s: s.loaded.max_num_seqs),
    counter("requests_completed_total", "Number of completed requests by finish reason.",
        lambda s: each(s.requests.finished, FINISH_REASONS), "finish_reason"),
    engine_histogram("time_to_first_token_seconds",
        "Time from the engine's acceptance of a request to its first token, in seconds.",
        "time_to_first_token_seconds"),
    engine_histogram("inter_token_latency_seconds", "Time from a token of a sequence to the next, in seconds.",
        "inter_token_latency_seconds"),
    engine_histogram("time_per_output_token_seconds",
        "Mean time between the tokens of a request, in seconds.",
        "time_per_output_token_seconds"),
    engine_histogram("request_e2e_seconds",
        "Time from the engine's acceptance of a request to its last token, in seconds.",
        "request_seconds"),
    engine_histogram("request_wait_seconds",
        "Time from the engine's acceptance of a request to its first step, in seconds.",
        "request_wait_seconds"),
    engine_histogram("request_prefill_seconds", "Time from a request's first step to its first token, in seconds.",
        "request_prefill_seconds"),
    engine_histogram("request_decode_seconds", "Time from a request's first token to its last, in seconds.",
        "request_decode_seconds"),
    engine_histogram("request_inference_seconds", "Time from a request's first step to its last token, in seconds.",
        "request_inference_seconds"),
    engine_histogram("request_prompt_tokens", "Number of prompt tokens of a request.", "prompt_tokens"),
    engine_histogram("request_generated_tokens", "Number of tokens generated for a request.", "generated_tokens"),
    engine_histogram("request_longest_sample_tokens", "Number of tokens of a request's longest sample.",
        "longest_sample_tokens"),
    engine_histogram("request_params_n", "Number of samples of a request (n).", "request_samples"),
    engine_histogram("request_params_max_tokens", "Value of max_tokens of a request.", "request_max_tokens"),
)  # fmt: skip

TOKENS: tuple[Metric[EngineStats], ...] = (
    counter("prompt_tokens_total", "Number of prompt tokens of accepted requests.",
        lambda s: s.requests.prompt_tokens),
    counter("prompt_tokens_by_source_total",
        "Number of prompt tokens of started requests, by source of their KV.",
        lambda s: each(s.requests.prompt_tokens_by_source, PROMPT_SOURCES), "source"),
    counter("pooled_texts_total",
        "Number of texts that got a vector (embed), labels (classify) or a score (rerank).",
        lambda s: dict(s.requests.pooled_texts.items()), "task"),
    counter("generated_tokens_total", "Number of tokens generated.", lambda s: s.requests.generated_tokens),
    counter("structured_outputs_total",
        "Number of samples with structured_outputs that ended; truncated: at max_tokens.",
        lambda s: each(s.requests.structured_outputs, STRUCTURED_RESULTS), "result"),
    engine_histogram("grammar_compile_seconds", "Time to compile structured_outputs, in seconds.",
        "grammar_compile_seconds"),
    counter("grammar_cache_total", "Number of grammar requests that found a compiled grammar (hit) or not (miss).",
        _grammar_cache, "result"),
)  # fmt: skip

ENGINE_METRICS = STEPS + REQUESTS + TOKENS + ADAPTERS + MEDIA
