"""The KV cache: the state of its blocks, their use, and their movement."""

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
    gauge,
    gauge_by,
    quantiles,
    rate,
    rate_by,
    total,
    total_rate,
)


def kv_cache() -> Dashboard:
    rows = [
        Row("Blocks", _blocks()),
        Row("Worth", _worth()),
        Row("Motion", _motion()),
        Row("Residency", _residency(), is_collapsed=True),
    ]
    about = (
        "Every KV block is free, cached, active or reserved; the states sum to the capacity at every scrape."
    )
    return board("kv-cache", "KV cache", about, rows)


def _blocks() -> list[Panel]:
    return [
        lines(
            "Blocks by state",
            COUNT,
            gauge_by("state", "kv_cache_blocks"),
            total("kv_cache_capacity_blocks", "capacity"),
            about="free: nothing in it. cached: no reference, reusable by a prefix. active: in use. reserved:"
            " the null block, and blocks that wait for steps in flight.",
            stacked=True,
            width=12,
        ),
        heat(
            "Utilisation of every step",
            RATIO,
            "kv_cache_step_utilization_ratio",
            about="Observed at each step, so that a pool that is full between two scrapes is seen.",
            width=12,
        ),
        lines(
            "Utilisation and occupancy",
            RATIO,
            gauge("kv_cache_utilization_ratio", "{{instance}} active"),
            gauge("kv_cache_occupancy_ratio", "{{instance}} active and cached"),
            gauge("kv_cache_peak_utilization_ratio", "{{instance}} peak"),
            about="Shares of the capacity; the peak is of any step since the worker started.",
            most=1,
        ),
        lines(
            "Waste",
            RATIO,
            gauge("kv_cache_waste_ratio"),
            about="Token slots of active blocks that hold nothing: the last block of each sequence is not full.",
            most=1,
        ),
        lines(
            "Blocks by window",
            COUNT,
            gauge_by("window", "kv_cache_window_blocks"),
            about="Active blocks by the window of the layers that they are for; all: layers that read everything.",
            stacked=True,
        ),
        lines(
            "Blocks of host memory",
            COUNT,
            gauge_by("state", "kv_cache_host_blocks"),
            about="Swap space. Nothing without --option swap_space_gib.",
            stacked=True,
        ),
    ]


def _worth() -> list[Panel]:
    return [
        lines(
            "Sharing",
            "none",
            Query(
                f"pagemill_kv_cache_block_references{{{WORKER}}}"
                f' / (sum without (state) (pagemill_kv_cache_blocks{{{WORKER}, state="active"}}) > 0)',
                "{{instance}}",
            ),
            about="References to each active block, on average: 1 without any sharing.",
        ),
        lines(
            "Prefix hit rate",
            RATIO,
            Query(
                f"sum by (instance) ({rate('prefix_cache_hit_tokens_total')})"
                f" / (sum by (instance) ({rate('prefix_cache_queried_tokens_total')}) > 0)",
                "{{instance}}",
            ),
            about="Tokens found / tokens looked up.",
            most=1,
        ),
        lines(
            "Tokens not computed again",
            TOKENS_PER_SECOND,
            rate_by("instance", "prefix_cache_hit_tokens_total"),
            about="Prompt tokens whose KV came from the prefix cache.",
        ),
        lines(
            "Shared blocks",
            COUNT,
            gauge("kv_cache_shared_blocks"),
            about="Blocks with two or more references.",
        ),
        lines(
            "Copies on write",
            PER_SECOND,
            rate_by("instance", "kv_cache_cow_copies_total"),
            about="A sample writes into a block that another one shares.",
        ),
        lines(
            "Blocks at a request's peak",
            COUNT,
            *quantiles("request_peak_kv_blocks", 0.5, 0.95, 0.99),
            about="What a request costs; those its samples share count for each.",
        ),
    ]


def _motion() -> list[Panel]:
    return [
        lines(
            "Allocated, freed, evicted",
            PER_SECOND,
            total_rate("kv_cache_block_allocations_total", "allocated"),
            total_rate("kv_cache_block_frees_total", "freed"),
            total_rate("kv_cache_block_evictions_total", "evicted"),
            total_rate("kv_cache_window_frees_total", "left behind by windows"),
            about="Blocks per second. Evictions: cached blocks taken for new tokens. Left behind by windows: given"
            " back by sequences that go on.",
        ),
        lines(
            "Preemptions",
            PER_SECOND,
            rate_by("mode", "preemptions_total"),
            total_rate("urgent_preemptions_total", "for urgent jobs"),
            about="Sequences put back to waiting, for lack of blocks or for a job of high priority.",
        ),
        lines(
            "Tokens computed again",
            TOKENS_PER_SECOND,
            total_rate("preempted_tokens_total", "thrown away"),
            total_rate("preempted_tokens_recomputed_total", "computed again"),
            about="What preemption costs. What the prefix cache still has is thrown away, and not computed again.",
        ),
        lines(
            "Asked for and not had",
            PER_SECOND,
            rate_by("instance", "kv_cache_allocation_failures_total"),
            about="Sequences that needed blocks when there were none.",
        ),
        lines(
            "Requests that wait for blocks",
            COUNT,
            Query(f'pagemill_requests_waiting{{{WORKER}, reason="kv"}}', "{{instance}}"),
            about="Inside the engine; jobs in the queue are not in it.",
        ),
        lines(
            "Swapped",
            BYTES,
            rate_by("direction", "kv_cache_swapped_bytes_total"),
            about="Bytes per second between device and host.",
        ),
    ]


def _residency() -> list[Panel]:
    about = "One block in 64 is timed."
    return [
        lines("A block's life", SECONDS, *quantiles("kv_block_lifetime_seconds", 0.5, 0.95), about=about),
        lines(
            "Idle before eviction",
            SECONDS,
            *quantiles("kv_block_idle_before_evict_seconds", 0.5, 0.95),
            about=f"Short: the pool is too small to keep prefixes. {about}",
        ),
        lines("Idle before reuse", SECONDS, *quantiles("kv_block_reuse_gap_seconds", 0.5, 0.95), about=about),
    ]
