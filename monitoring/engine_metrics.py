"""The engine's metrics: the KV cache first, then steps, requests and tokens."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from engine.outputs import EngineStats, HistogramSnapshot, KVCacheStats, SchedulerStats
from monitoring.metrics import Labels, Metric, Number, counter, gauge, histogram

FINISH_REASONS = ("stop", "length", "abort", "error")

NOT_LOADED = EngineStats(
    kv=KVCacheStats(*(0,) * 9),
    scheduler=SchedulerStats(),
    tier="",
    fingerprint="",
    model="",
    device="",
    max_model_len=0,
    max_num_seqs=0,
)
"""Stands in until the model is loaded: every series is there from the first scrape, at 0."""


def accounting_errors(kv: KVCacheStats) -> list[str]:
    """What contradicts itself in a snapshot of the block pool; [] when it adds up."""
    states = kv.free_blocks + kv.cached_blocks + kv.active_blocks + kv.reserved_blocks
    checks = {
        f"states sum to {states}, capacity is {kv.capacity_blocks}": states == kv.capacity_blocks,
        f"{kv.shared_blocks} shared of {kv.active_blocks} active blocks": kv.shared_blocks
        <= kv.active_blocks,
        f"{kv.block_references} references to {kv.active_blocks} active blocks": (
            kv.block_references >= kv.active_blocks + kv.shared_blocks
        ),
        f"{kv.filled_slots} filled slots in {kv.active_blocks} active blocks of {kv.block_size}": (
            kv.filled_slots <= kv.active_blocks * kv.block_size
        ),
        "a negative count": min(
            kv.free_blocks,
            kv.cached_blocks,
            kv.active_blocks,
            kv.reserved_blocks,
            kv.shared_blocks,
            kv.filled_slots,
        )
        >= 0,
    }
    return [message for message, holds in checks.items() if not holds]


def _blocks_by_state(stats: EngineStats) -> Mapping[str, Number]:
    kv = stats.kv
    return {
        "free": kv.free_blocks,
        "cached": kv.cached_blocks,
        "active": kv.active_blocks,
        "reserved": kv.reserved_blocks,
    }


def _occupancy(stats: EngineStats) -> float:
    kv = stats.kv
    return (kv.active_blocks + kv.cached_blocks) / kv.capacity_blocks if kv.capacity_blocks else 0.0


def _finished(stats: EngineStats) -> Mapping[str, Number]:
    return {reason: stats.finished.get(reason, 0) for reason in FINISH_REASONS}


def _from(name: str) -> Callable[[EngineStats], Mapping[Labels, HistogramSnapshot]]:
    """Reads the engine's histogram `name`."""
    return lambda stats: stats.histograms.get(name, {})


KV_CACHE: tuple[Metric[EngineStats], ...] = (
    gauge("kv_cache_capacity_blocks", "KV blocks in the pool.", lambda s: s.kv.capacity_blocks),
    gauge("kv_cache_block_size_tokens", "Token slots in a KV block.", lambda s: s.kv.block_size),
    gauge(
        "kv_cache_blocks",
        "KV blocks by state; the states sum to the capacity. cached: no reference, but reusable by a prefix."
        " reserved: the null block, and blocks that wait for steps in flight.",
        _blocks_by_state,
        "state",
    ),
    gauge("kv_cache_shared_blocks", "KV blocks with two or more references.", lambda s: s.kv.shared_blocks),
    gauge(
        "kv_cache_block_references",
        "References to KV blocks; divided by the active blocks it is the sharing ratio.",
        lambda s: s.kv.block_references,
    ),
    gauge("kv_cache_utilization_ratio", "Active KV blocks / capacity.", lambda s: s.kv.utilization),
    gauge(
        "kv_cache_peak_utilization_ratio",
        "Highest KV cache utilisation of any step since the worker started.",
        lambda s: s.peak_utilization,
    ),
    gauge("kv_cache_occupancy_ratio", "Active and cached KV blocks / capacity.", _occupancy),
    gauge(
        "kv_cache_filled_token_slots",
        "Token slots in use in active KV blocks; a shared block counts once.",
        lambda s: s.kv.filled_slots,
    ),
    gauge(
        "kv_cache_waste_ratio",
        "Share of the token slots of active KV blocks that hold nothing.",
        lambda s: s.kv.waste,
    ),
    histogram(
        "kv_cache_step_utilization_ratio",
        "KV cache utilisation, observed at every step.",
        _from("step_utilization"),
    ),
    counter("kv_cache_block_allocations_total", "KV blocks allocated.", lambda s: s.kv.allocations),
    counter("kv_cache_block_frees_total", "KV blocks whose last reference went.", lambda s: s.kv.frees),
    counter(
        "kv_cache_block_evictions_total", "Cached KV blocks taken for new tokens.", lambda s: s.kv.evictions
    ),
    counter(
        "kv_cache_allocation_failures_total",
        "Times a sequence asked for blocks and got none.",
        lambda s: s.kv.allocation_failures,
    ),
    counter("kv_cache_cow_copies_total", "KV blocks copied on write.", lambda s: s.kv.cow_copies),
    counter(
        "prefix_cache_queried_tokens_total",
        "Prompt tokens looked up in the prefix cache.",
        lambda s: s.kv.prefix_queried_tokens,
    ),
    counter(
        "prefix_cache_hit_tokens_total",
        "Prompt tokens whose KV came from the prefix cache.",
        lambda s: s.kv.prefix_hit_tokens,
    ),
    counter(
        "preemptions_total",
        "Sequences put back to waiting for lack of KV blocks.",
        lambda s: {"recompute": s.scheduler.preemptions},
        "mode",
    ),
    counter(
        "preempted_tokens_recomputed_total",
        "Computed tokens that preemption threw away (prefix hits not deducted).",
        lambda s: s.scheduler.preempted_tokens,
    ),
)

STEPS: tuple[Metric[EngineStats], ...] = (
    counter("engine_steps_total", "Engine steps finished.", lambda s: s.steps),
    counter("engine_steps_failed_total", "Engine steps that raised.", lambda s: s.scheduler.steps_failed),
    counter(
        "engine_computed_tokens_total",
        "Tokens that went through the model, redone ones included.",
        lambda s: s.computed_tokens,
    ),
    counter(
        "engine_discarded_tokens_total",
        "Sampled tokens thrown away because their sequence had ended a step before.",
        lambda s: s.scheduler.discarded_tokens,
    ),
    histogram("engine_step_seconds", "Time of a step by phase.", _from("step_seconds"), "phase", "kind"),
    histogram("engine_step_tokens", "Tokens in a step by kind.", _from("step_tokens"), "kind"),
    histogram("engine_batch_size", "Sequences in a step.", _from("batch_size")),
    counter("invalid_logits_total", "Rows whose logits were not finite.", lambda s: s.invalid_logits),
)

REQUESTS: tuple[Metric[EngineStats], ...] = (
    gauge("requests_running", "Sequences that hold a row of the batch.", lambda s: s.scheduler.running),
    gauge("requests_waiting", "Requests inside the engine that wait.", lambda s: s.scheduler.waiting),
    counter("requests_completed_total", "Requests by how they ended.", _finished, "finish_reason"),
    counter("prompt_tokens_total", "Prompt tokens of admitted requests.", lambda s: s.prompt_tokens),
    counter("generated_tokens_total", "Tokens generated.", lambda s: s.generated_tokens),
    histogram(
        "time_to_first_token_seconds",
        "From the engine's acceptance of a request to its first token.",
        _from("time_to_first_token_seconds"),
    ),
    histogram(
        "inter_token_latency_seconds",
        "Between two tokens of a sequence.",
        _from("inter_token_latency_seconds"),
    ),
    histogram(
        "request_inference_seconds",
        "From the engine's acceptance of a request to its last token.",
        _from("request_seconds"),
    ),
    histogram("request_prompt_tokens", "Prompt length of requests.", _from("prompt_tokens")),
    histogram("request_generated_tokens", "Tokens generated by request.", _from("generated_tokens")),
)

ENGINE_METRICS = KV_CACHE + STEPS + REQUESTS
