"""The KV cache's metrics: first blocks by state, then use, waste, sharing and movement."""

from __future__ import annotations

from collections.abc import Mapping

from pagemill.engine.outputs import EngineStats, KVCacheStats
from pagemill.monitoring.metrics.metric import Metric, Number, counter, engine_histogram, gauge


def accounting_errors(kv: KVCacheStats) -> list[str]:
    """Return the contradictions in a snapshot of the block pool; [] if it is consistent."""
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
        f"{kv.groups} are not {kv.active_blocks} active blocks": (
            not kv.groups or sum(blocks for _, blocks in kv.groups) == kv.active_blocks
        ),
        f"{kv.host_used_blocks} of {kv.host_capacity_blocks} host blocks used": (
            kv.host_used_blocks <= kv.host_capacity_blocks
        ),
        "a negative count": min(
            kv.free_blocks,
            kv.cached_blocks,
            kv.active_blocks,
            kv.reserved_blocks,
            kv.shared_blocks,
            kv.filled_slots,
            kv.host_used_blocks,
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


def _blocks_by_window(stats: EngineStats) -> Mapping[str, Number]:
    return {
        "all" if window is None else str(window): blocks for window, blocks in stats.kv.active_by_window()
    }


def _host_blocks(stats: EngineStats) -> Mapping[str, Number]:
    kv = stats.kv
    return {"used": kv.host_used_blocks, "free": kv.host_capacity_blocks - kv.host_used_blocks}


def _swapped_blocks(stats: EngineStats) -> Mapping[str, Number]:
    return {"out": stats.kv.swapped_out_blocks, "in": stats.kv.swapped_in_blocks}


def _swapped_bytes(stats: EngineStats) -> Mapping[str, Number]:
    return {way: blocks * stats.kv.block_bytes for way, blocks in _swapped_blocks(stats).items()}


def _occupancy(stats: EngineStats) -> float:
    kv = stats.kv
    return (kv.active_blocks + kv.cached_blocks) / kv.capacity_blocks if kv.capacity_blocks else 0.0


def _preemptions(stats: EngineStats) -> Mapping[str, Number]:
    return {"recompute": stats.scheduler.preemptions, "swap": stats.scheduler.swap_preemptions}


BLOCKS: tuple[Metric[EngineStats], ...] = (
    gauge("kv_cache_capacity_blocks", "KV blocks in the pool.", lambda s: s.kv.capacity_blocks),
    gauge("kv_cache_block_size_tokens", "Token slots in a KV block.", lambda s: s.kv.block_size),
    gauge(
        "kv_cache_block_bytes",
        "Bytes of a KV block over the layers that share it; 0 without a device cache.",
        lambda s: s.kv.block_bytes,
    ),
    gauge(
        "kv_cache_blocks",
        "KV blocks by state; the states sum to the capacity. cached: no reference, but reusable by a prefix."
        " reserved: the null block, and blocks that wait for steps in flight.",
        _blocks_by_state,
        "state",
    ),
    gauge(
        "kv_cache_window_blocks",
        "Active KV blocks by the window, in tokens, of the layers that they are for; all: layers without a window.",
        _blocks_by_window,
        "window",
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
        lambda s: s.steps.peak_utilization,
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
    engine_histogram(
        "kv_cache_step_utilization_ratio",
        "KV cache utilisation, observed at every step.",
        "step_utilization",
    ),
)

MOVEMENTS: tuple[Metric[EngineStats], ...] = (
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
    counter(
        "kv_cache_window_frees_total",
        "KV blocks that running sequences gave back because their layers' window had left them behind.",
        lambda s: s.kv.window_frees,
    ),
    counter("kv_cache_cow_copies_total", "KV blocks copied on write.", lambda s: s.kv.cow_copies),
    counter(
        "kv_cache_cow_copied_bytes_total",
        "Bytes of KV blocks copied on write.",
        lambda s: s.kv.cow_copies * s.kv.block_bytes,
    ),
    gauge("kv_cache_host_blocks", "Blocks of swap space in host memory by state.", _host_blocks, "state"),
    counter(
        "kv_cache_swapped_blocks_total",
        "KV blocks moved to host memory (out) and back (in).",
        _swapped_blocks,
        "direction",
    ),
    counter(
        "kv_cache_swapped_bytes_total",
        "Bytes of KV blocks moved to host memory (out) and back (in).",
        _swapped_bytes,
        "direction",
    ),
    counter(
        "preemptions_total",
        "Sequences put back to waiting, for lack of KV blocks or for an urgent job, by what became of their KV.",
        _preemptions,
        "mode",
    ),
    counter(
        "urgent_preemptions_total",
        "Sequences of low priority put back to waiting for a job of high priority.",
        lambda s: s.scheduler.displaced,
    ),
    counter(
        "preempted_tokens_total",
        "Computed tokens that preemption threw away (prefix hits not deducted).",
        lambda s: s.scheduler.preempted_tokens,
    ),
    counter(
        "preempted_tokens_recomputed_total",
        "Tokens that preempted sequences computed a second time (prefix hits deducted).",
        lambda s: s.scheduler.recomputed_tokens,
    ),
)

PREFIXES_AND_RESIDENCY: tuple[Metric[EngineStats], ...] = (
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
    engine_histogram(
        "request_peak_kv_blocks",
        "The most KV blocks that a request held, those its samples share counted for each.",
        "request_peak_blocks",
    ),
    engine_histogram(
        "kv_block_lifetime_seconds",
        "From a KV block's allocation until what it holds is gone; one block in 64 is timed.",
        "block_lifetime_seconds",
    ),
    engine_histogram(
        "kv_block_idle_before_evict_seconds",
        "How long an evicted KV block had been idle; one block in 64 is timed.",
        "block_idle_seconds",
    ),
    engine_histogram(
        "kv_block_reuse_gap_seconds",
        "How long a KV block had been idle when a prefix hit took it; one block in 64 is timed.",
        "block_reuse_gap_seconds",
    ),
)

KV_CACHE_METRICS = BLOCKS + MOVEMENTS + PREFIXES_AND_RESIDENCY
