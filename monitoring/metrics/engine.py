"""The engine's metrics except the KV cache's: steps, requests and tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

from pagemill.engine.outputs import EngineStats, FinishReason, StructuredResult, WaitReason
from pagemill.monitoring.metrics.adapters import ADAPTERS
from pagemill.monitoring.metrics.metric import Metric, Number, counter, engine_histogram, gauge

FINISH_REASONS: tuple[FinishReason, ...] = get_args(FinishReason)
WAIT_REASONS: tuple[WaitReason, ...] = get_args(WaitReason)
STRUCTURED_RESULTS: tuple[StructuredResult, ...] = get_args(StructuredResult)


def _waiting(stats: EngineStats) -> Mapping[str, Number]:
    scheduler = stats.scheduler
    return {reason: scheduler.waiting * (reason == scheduler.waiting_for) for reason in WAIT_REASONS}


def _finished(stats: EngineStats) -> Mapping[str, Number]:
    return {reason: stats.requests.finished.get(reason, 0) for reason in FINISH_REASONS}


def _structured(stats: EngineStats) -> Mapping[str, Number]:
    return {result: stats.requests.structured_outputs.get(result, 0) for result in STRUCTURED_RESULTS}


def _prompt_sources(stats: EngineStats) -> Mapping[str, Number]:
    return {
        "computed": stats.requests.prompt_tokens_by_source.get("computed", 0),
        "prefix_cache": stats.requests.prompt_tokens_by_source.get("prefix_cache", 0),
    }


def _steps_by_mode(stats: EngineStats) -> Mapping[str, Number]:
    return {"graph": stats.steps.replayed, "eager": stats.steps.finished - stats.steps.replayed}


def _grammar_cache(stats: EngineStats) -> Mapping[str, Number]:
    return {"hit": stats.grammars.hits, "miss": stats.grammars.misses}


def _memory(stats: EngineStats) -> Mapping[str, Number]:
    return dict(stats.memory_bytes.items())


STEPS: tuple[Metric[EngineStats], ...] = (
    counter("engine_steps_total", "Engine steps finished.", lambda s: s.steps.finished),
    counter("engine_steps_failed_total", "Engine steps that raised.", lambda s: s.scheduler.steps_failed),
    counter(
        "engine_graph_steps_total",
        "Engine steps by how the device ran them: replayed from a CUDA graph, or eagerly.",
        _steps_by_mode,
        "mode",
    ),
    counter(
        "engine_busy_seconds_total",
        "Time inside steps; what its rate lacks to 1 is idle time.",
        lambda s: s.steps.busy_seconds,
    ),
    counter(
        "engine_computed_tokens_total",
        "Tokens that went through the model, redone ones included.",
        lambda s: s.steps.computed_tokens,
    ),
    counter(
        "engine_sharing_rows_total",
        "Rows by step, of one token, that began with the same blocks as another row. Of 64 common tokens or more a CPU"
        " reads keys and values once for both.",
        lambda s: s.steps.sharing_rows,
    ),
    counter(
        "engine_discarded_tokens_total",
        "Sampled tokens thrown away because their sequence had ended a step before.",
        lambda s: s.scheduler.discarded_tokens,
    ),
    counter(
        "draft_tokens_total",
        "Tokens computed before it was known whether they would be sampled.",
        lambda s: s.scheduler.drafted_tokens,
    ),
    counter(
        "draft_tokens_accepted_total",
        "Drafted tokens that were sampled: each saved its sequence a step.",
        lambda s: s.scheduler.accepted_tokens,
    ),
    engine_histogram(
        "engine_step_seconds",
        "Time of a step by phase (schedule, prepare, forward, sample, output) and kind (prefill: no row decodes,"
        " decode: all do, mixed).",
        "step_seconds",
        "phase",
        "kind",
    ),
    engine_histogram("engine_step_tokens", "Tokens in a step by kind.", "step_tokens", "kind"),
    engine_histogram(
        "engine_batch_token_budget_ratio", "Tokens in a step / max_num_batched_tokens.", "step_budget_use"
    ),
    engine_histogram("engine_batch_size", "Sequences in a step.", "batch_size"),
    counter(
        "invalid_logits_total", "Rows whose logits were not finite.", lambda s: s.scheduler.invalid_logits
    ),
    gauge("device_memory_bytes", "The model's memory by use, as far as it is known.", _memory, "use"),
)

REQUESTS: tuple[Metric[EngineStats], ...] = (
    gauge("requests_running", "Sequences that hold a row of the batch.", lambda s: s.scheduler.running),
    gauge(
        "requests_waiting",
        "Requests that wait inside the engine, by what the first of them lacks: the step's token budget, a"
        " row, or KV blocks.",
        _waiting,
        "reason",
    ),
    gauge("requests_swapped", "Sequences whose KV blocks are in host memory.", lambda s: s.scheduler.swapped),
    gauge("max_num_seqs", "Rows of the batch.", lambda s: s.loaded.max_num_seqs),
    counter("requests_completed_total", "Requests by how they ended.", _finished, "finish_reason"),
    engine_histogram(
        "time_to_first_token_seconds",
        "From the engine's acceptance of a request to its first token.",
        "time_to_first_token_seconds",
    ),
    engine_histogram(
        "inter_token_latency_seconds", "Between two tokens of a sequence.", "inter_token_latency_seconds"
    ),
    engine_histogram(
        "time_per_output_token_seconds",
        "Mean time between the tokens of a request, observed once per request.",
        "time_per_output_token_seconds",
    ),
    engine_histogram(
        "request_e2e_seconds",
        "From the engine's acceptance of a request to its last token.",
        "request_seconds",
    ),
    engine_histogram(
        "request_wait_seconds",
        "From the engine's acceptance of a request to its first step.",
        "request_wait_seconds",
    ),
    engine_histogram(
        "request_prefill_seconds",
        "From a request's first step to its first token.",
        "request_prefill_seconds",
    ),
    engine_histogram(
        "request_decode_seconds", "From a request's first token to its last.", "request_decode_seconds"
    ),
    engine_histogram(
        "request_inference_seconds",
        "From a request's first step to its last token.",
        "request_inference_seconds",
    ),
    engine_histogram("request_prompt_tokens", "Prompt length of requests.", "prompt_tokens"),
    engine_histogram("request_generated_tokens", "Tokens generated by request.", "generated_tokens"),
    engine_histogram(
        "request_longest_sample_tokens", "Tokens of a request's longest sample.", "longest_sample_tokens"
    ),
    engine_histogram("request_params_n", "Samples that requests asked for.", "request_samples"),
    engine_histogram("request_params_max_tokens", "The max_tokens of requests.", "request_max_tokens"),
)

TOKENS: tuple[Metric[EngineStats], ...] = (
    counter("prompt_tokens_total", "Prompt tokens of accepted requests.", lambda s: s.requests.prompt_tokens),
    counter(
        "prompt_tokens_by_source_total",
        "Prompt tokens of requests that have started, by where their KV came from.",
        _prompt_sources,
        "source",
    ),
    counter(
        "pooled_texts_total",
        "Texts that got a vector (embed), labels (classify) or a score (rerank), by task.",
        lambda s: dict(s.requests.pooled_texts.items()),
        "task",
    ),
    counter("generated_tokens_total", "Tokens generated.", lambda s: s.requests.generated_tokens),
    counter(
        "structured_outputs_total",
        "Samples with structured_outputs that have ended. truncated: max_tokens came first.",
        _structured,
        "result",
    ),
    engine_histogram(
        "grammar_compile_seconds", "Time to compile structured_outputs.", "grammar_compile_seconds"
    ),
    counter("grammar_cache_total", "Grammars asked for, by whether they were compiled already.",
            _grammar_cache, "result"),
)  # fmt: skip

ENGINE_METRICS = STEPS + REQUESTS + TOKENS + ADAPTERS
