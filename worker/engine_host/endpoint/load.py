"""The load of an endpoint, from the metrics that it exports."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass

from pagemill.engine.outputs import KVCacheStats

_SAMPLE = re.compile(r"^([A-Za-z_:][\w:]*)(?:\{(.*)\})?[ \t]+(\S+)", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="([^"]*)"')
_RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "tgi_batch_current_size")
_WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "tgi_queue_size")
_USE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage")
_QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")
_HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")
_CACHE_CONFIG = "vllm:cache_config_info"
_NO_POOL = 10_000
"""Number of blocks assumed for a pool of unknown size whose utilization is known."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load at one moment; None: the endpoint does not report the value."""

    running: int | None = None
    waiting: int | None = None
    rows: int | None = None
    """Maximum number of concurrent sequences."""
    kv_use: float | None = None
    """The share of the KV cache that is in use."""
    kv_blocks: int | None = None
    block_size: int = 16
    prefix_queried: int | None = None
    """Prompt tokens looked up in the prefix cache; the next field counts those found there."""
    prefix_hit: int | None = None

    def kv_stats(self) -> tuple[KVCacheStats, frozenset[str]]:
        """Return the statistics of the KV cache, and the names of the metrics that they suffice for."""
        known = set()
        blocks = self.kv_blocks or _NO_POOL
        active = round(blocks * (self.kv_use or 0.0))
        if self.kv_use is not None:
            known.add("kv_cache_utilization_ratio")
        if self.kv_blocks is not None:
            known |= {"kv_cache_capacity_blocks", "kv_cache_block_size_tokens"}
        if self.prefix_queried is not None:
            known.add("prefix_cache_queried_tokens_total")
        if self.prefix_hit is not None:
            known.add("prefix_cache_hit_tokens_total")
        stats = KVCacheStats(
            capacity_blocks=blocks,
            block_size=self.block_size,
            free_blocks=blocks - active,
            active_blocks=active,
            block_references=active,
            prefix_queried_tokens=self.prefix_queried or 0,
            prefix_hit_tokens=self.prefix_hit or 0,
        )
        return stats, frozenset(known)


def read_metrics(text: str) -> Load:
    """Read an exposition in Prometheus' format from any engine. Unknown lines are skipped."""
    sums: dict[str, float] = {}
    most: dict[str, float] = {}
    config: dict[str, str] = {}
    for name, labels, value in _samples(text):
        sums[name] = sums.get(name, 0.0) + value
        most[name] = max(most.get(name, value), value)
        if name == _CACHE_CONFIG:
            config = dict(_LABEL.findall(labels))
    use = _first(most, _USE)
    return Load(
        running=_count(_first(sums, _RUNNING)),
        waiting=_count(_first(sums, _WAITING)),
        kv_use=None if use is None else min(use, 1.0),
        kv_blocks=_positive(config.get("num_gpu_blocks")),
        block_size=_positive(config.get("block_size")) or 16,
        prefix_queried=_count(_first(sums, _QUERIES)),
        prefix_hit=_count(_first(sums, _HITS)),
    )


def read_slots(body: bytes) -> Load:
    """Read llama.cpp's `/slots`. Unreadable input results in an empty `Load`."""
    try:
        slots = json.loads(body)
    except (ValueError, RecursionError):
        return Load()
    if not isinstance(slots, list) or not slots:
        return Load()
    busy = sum(isinstance(slot, dict) and slot.get("is_processing") is True for slot in slots)
    return Load(running=busy, waiting=0, rows=len(slots))


def _samples(text: str) -> Iterator[tuple[str, str, float]]:
    for name, labels, written in _SAMPLE.findall(text):
        try:
            value = float(written)
        except ValueError:
            continue
        if math.isfinite(value) and 0.0 <= value < 1e15:
            yield name, labels, value


def _first(values: dict[str, float], names: tuple[str, ...]) -> float | None:
    return next((values[name] for name in names if name in values), None)


def _count(value: float | None) -> int | None:
    return None if value is None else int(value)


def _positive(text: str | None) -> int | None:
    return (
        int(text)
        if text is not None and text.isascii() and text.isdigit() and 0 < int(text) < 2**31
        else None
    )
