"""Every metric that a worker or a gateway exports, in the order of the reference page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagemill.monitoring.metrics.adapters import ADAPTERS
from pagemill.monitoring.metrics.engine import REQUESTS, STEPS, TOKENS
from pagemill.monitoring.metrics.gateway import GATEWAY_METRICS
from pagemill.monitoring.metrics.kv_cache import BLOCKS, MOVEMENTS, PREFIXES_AND_RESIDENCY
from pagemill.monitoring.metrics.media import MEDIA
from pagemill.monitoring.metrics.metric import Metric
from pagemill.monitoring.metrics.queue import JOBS_AND_WORKERS, ROLLOUTS, SERVER
from pagemill.monitoring.metrics.scrape import SCRAPE_METRICS
from pagemill.monitoring.metrics.worker import ADMISSION_AND_REDIS, JOBS, LEASES_AND_COMMITS, PROCESS


@dataclass(frozen=True, slots=True)
class Section:
    source: Literal["engine", "queue", "worker", "scrape", "gateway"]
    """The snapshot that its metrics read."""
    title: str
    intro: str
    metrics: tuple[Metric[Any], ...]


SECTIONS = (
    Section(
        "engine",
        "KV blocks",
        "The states of the blocks sum to the capacity in every scrape.",
        BLOCKS,
    ),
    Section("engine", "KV blocks in motion", "", MOVEMENTS),
    Section(
        "engine",
        "Prefixes and residency",
        "",
        PREFIXES_AND_RESIDENCY,
    ),
    Section(
        "queue",
        "Queue",
        "Exported by every worker of the queue and by `pagemill exporter`:\n"
        "take `max by (queue, model, priority)` before you sum. Absent while Redis does not respond.\n"
        "Models after the first 100 are one, `other`.",
        JOBS_AND_WORKERS,
    ),
    Section(
        "queue",
        "Rollouts",
        "By model and side (`stable` or `canary`); absent without a rollout. Take `max` before you sum.",
        ROLLOUTS,
    ),
    Section("queue", "The Redis server", "From INFO; absent if the server does not allow it.", SERVER),
    Section("worker", "Jobs", "", JOBS),
    Section("worker", "Leases and commits", "", LEASES_AND_COMMITS),
    Section("worker", "Admission and Redis", "", ADMISSION_AND_REDIS),
    Section("engine", "Engine steps", "", STEPS),
    Section("engine", "Requests in the engine", "Buckets are vLLM's.", REQUESTS),
    Section("engine", "Tokens and grammars", "", TOKENS),
    Section("engine", "Adapters", "LoRA adapters, by the names that jobs use.", ADAPTERS),
    Section("engine", "Images", "Of models that read images.", MEDIA),
    Section("worker", "Worker", "", PROCESS),
    Section("scrape", "The scrape", "", SCRAPE_METRICS),
    Section(
        "gateway",
        "Gateway",
        "Exported by `pagemill gateway`. A route is `(none)` for requests that were rejected before routing;\n"
        "a series begins with the first response.",
        GATEWAY_METRICS,
    ),
)

CATALOGUE: tuple[Metric[Any], ...] = tuple(metric for section in SECTIONS for metric in section.metrics)

OF_WORKERS: tuple[Metric[Any], ...] = tuple(
    metric for section in SECTIONS if section.source != "gateway" for metric in section.metrics
)
