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
        f"{kv.active_state_slots} active and {kv.cached_state_slots} cached of {kv.state_slots} state slots": (
            kv.active_state_slots + kv.cached_state_slots <= kv.state_slots
        ),
        "a negative count": min(
            kv.free_blocks,
            kv.cached_blocks,
            kv.active_blocks,
            kv.reserved_blocks,
            kv.shared_blocks,
            kv.filled_slots,
            kv.host_used_blocks,
            kv.active_state_slots,
            kv.cached_state_slots,
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


def _state_slots(stats: EngineStats) -> Mapping[str, Number]:
    kv = stats.kv
    active, cached = kv.active_state_slots, kv.cached_state_slots
    return {"free": kv.state_slots - active - cached, "active": active, "cached": cached}


def _host_blocks(stats: EngineStats) -> Mapping[str, Number]:
    kv = stats.kv
    return {"used": kv.host_used_blocks, "free": kv.host_capacity_blocks - kv.host_used_blocks}


def _host_copies(stats: EngineStats) -> Mapping[str, Number]:
    return {"store": stats.kv.host_stored_blocks, "load": stats.kv.host_loaded_blocks}


def _host_bytes(stats: EngineStats) -> Mapping[str, Number]:
    return {way: blocks * stats.kv.block_bytes for way, blocks in _host_copies(stats).items()}


def _occupancy(stats: EngineStats) -> float:
    kv = stats.kv
    return (kv.active_blocks + kv.cached_blocks) / kv.capacity_blocks if kv.capacity_blocks else 0.0


def _hit_tokens(stats: EngineStats) -> Mapping[str, Number]:
    kv = stats.kv
    return {"device": kv.prefix_hit_tokens - kv.host_hit_tokens, "host": kv.host_hit_tokens}


BLOCKS: tuple[Metric[EngineStats], ...] = (
    gauge("kv_cache_capacity_blocks", "Number of KV blocks in the pool.", lambda s: s.kv.capacity_blocks),
    gauge("kv_cache_block_size_tokens", "Number of token slots in a KV block.", lambda s: s.kv.block_size),
    gauge("kv_cache_block_bytes",
        "Size of a KV block in bytes; 0 without a device cache.",
        lambda s: s.kv.block_bytes),
    gauge("kv_cache_blocks",
        "Number of KV blocks by state; the states sum to the capacity. cached: no reference, but "
        "reusable by a prefix. reserved: the null block, and blocks that wait for steps in "
        "flight.", _blocks_by_state, "state"),
    gauge("kv_cache_window_blocks",
        "Number of active KV blocks by the attention window of their layers, in tokens; all: no "
        "window.",
        _blocks_by_window, "window"),
    gauge("kv_cache_state_slots",
        "Number of slots for the state of recurrent layers, by state: active for a sequence in a "
        "step, cached at the end of a prefix; 0 without such layers.",
        _state_slots, "state"),
    gauge("kv_cache_state_bytes", "Size of a sequence's recurrent state in bytes; 0 without recurrent layers.",
        lambda s: s.kv.state_bytes),
    gauge("kv_cache_shared_blocks", "Number of KV blocks with two or more references.",
        lambda s: s.kv.shared_blocks),
    gauge("kv_cache_block_references",
        "Number of references to KV blocks; divided by active blocks: the sharing ratio.",
        lambda s: s.kv.block_references),
    gauge("kv_cache_utilization_ratio", "Fraction of KV blocks that are active, 0 to 1.",
        lambda s: s.kv.utilization),
    gauge("kv_cache_peak_utilization_ratio",
        "Highest fraction of active KV blocks since the worker started, 0 to 1.",
        lambda s: s.steps.peak_utilization),
    gauge("kv_cache_occupancy_ratio", "Fraction of KV blocks that are active or cached, 0 to 1.", _occupancy),
    gauge("kv_cache_filled_token_slots",
        "Number of token slots in use in active KV blocks.", lambda s: s.kv.filled_slots),
    gauge("kv_cache_waste_ratio", "Fraction of token slots in active KV blocks that are empty, 0 to 1.",
        lambda s: s.kv.waste),
    engine_histogram("kv_cache_step_utilization_ratio", "Fraction of active KV blocks at each step, 0 to 1.",
        "step_utilization"),
)  # fmt: skip

MOVEMENTS: tuple[Metric[EngineStats], ...] = (
    counter("kv_cache_block_allocations_total", "Number of KV blocks allocated.", lambda s: s.kv.allocations),
    counter("kv_cache_block_frees_total", "Number of KV blocks freed (reference count reached zero).",
        lambda s: s.kv.frees),
    counter("kv_cache_block_evictions_total", "Number of cached KV blocks evicted.",
        lambda s: s.kv.evictions),
    counter("kv_cache_allocation_failures_total", "Number of block requests that failed because no block was free.",
        lambda s: s.kv.allocation_failures),
    counter("kv_cache_window_frees_total",
        "Number of KV blocks freed because they left the attention window.",
        lambda s: s.kv.window_frees),
    counter("kv_cache_cow_copies_total", "Number of KV blocks copied on write.", lambda s: s.kv.cow_copies),
    counter("kv_cache_cow_copied_bytes_total", "Size of the KV blocks copied on write, in bytes.",
        lambda s: s.kv.cow_copies * s.kv.block_bytes),
    gauge("kv_cache_host_blocks", "Number of blocks of the host tier by state.", _host_blocks, "state"),
    counter("kv_cache_host_copied_blocks_total",
        "Number of KV blocks copied to the host tier (store) and back (load).",
        _host_copies, "direction"),
    counter("kv_cache_host_copied_bytes_total",
        "Size of the KV blocks copied to the host tier (store) and back (load), in bytes.",
        _host_bytes, "direction"),
    counter("kv_cache_host_evictions_total", "Number of blocks evicted from the host tier.",
        lambda s: s.kv.host_evictions),
    counter("kv_cache_host_skipped_blocks_total",
        "Number of evicted KV blocks for which the host tier had no space.",
        lambda s: s.kv.host_skipped_blocks),
    counter("preemptions_total",
        "Number of sequences preempted, because KV blocks ran out or for a high-priority job.",
        lambda s: s.scheduler.preemptions),
    counter("urgent_preemptions_total",
        "Number of low-priority sequences preempted for a high-priority job.",
        lambda s: s.scheduler.displaced),
    counter("preempted_tokens_total",
        "Number of computed tokens that preemption discarded, including later prefix hits.",
        lambda s: s.scheduler.preempted_tokens),
    counter("preempted_tokens_recomputed_total",
        "Number of tokens that preempted sequences computed again.",
        lambda s: s.scheduler.recomputed_tokens),
)  # fmt: skip

PREFIXES_AND_RESIDENCY: tuple[Metric[EngineStats], ...] = (
    counter("prefix_cache_queried_tokens_total", "Number of prompt tokens looked up in the prefix cache.",
        lambda s: s.kv.prefix_queried_tokens),
    counter("prefix_cache_hit_tokens_total", "Number of prompt tokens found in the prefix cache.",
        lambda s: s.kv.prefix_hit_tokens),
    counter("prefix_cache_tier_hit_tokens_total",
        "Number of tokens found in the prefix cache, by memory.",
        _hit_tokens, "source"),
    engine_histogram("request_peak_kv_blocks",
        "Peak number of KV blocks of a request; shared blocks count for each sample.",
        "request_peak_blocks"),
    engine_histogram("kv_block_lifetime_seconds",
        "Time from a KV block's allocation to its eviction, in seconds (one block in 64).",
        "block_lifetime_seconds"),
    engine_histogram("kv_block_idle_before_evict_seconds",
        "Time from a KV block's last use to its eviction, in seconds (one block in 64).", "block_idle_seconds"),
    engine_histogram("kv_block_reuse_gap_seconds",
        "Time from a KV block's last use to its reuse, in seconds (one block in 64).",
        "block_reuse_gap_seconds"),
)  # fmt: skip

KV_CACHE_METRICS = BLOCKS + MOVEMENTS + PREFIXES_AND_RESIDENCY
