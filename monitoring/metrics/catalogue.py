"""Every metric that a worker or a gateway exports, in the order of the reference page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagemill.monitoring.metrics.adapters import ADAPTERS
from pagemill.monitoring.metrics.engine import REQUESTS, STEPS, TOKENS
from pagemill.monitoring.metrics.gateway import GATEWAY_METRICS
from pagemill.monitoring.metrics.kv_cache import BLOCKS, MOVEMENTS, PREFIXES_AND_RESIDENCY
from pagemill.monitoring.metrics.metric import Metric
from pagemill.monitoring.metrics.queue import JOBS_AND_WORKERS, SERVER
from pagemill.monitoring.metrics.rollouts import ROLLOUTS
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
        "A block is in exactly one state, and the states sum to the capacity in every scrape: it reads one"
        " immutable snapshot, which the engine takes between two steps.",
        BLOCKS,
    ),
    Section("engine", "KV blocks in motion", "What takes, frees, copies and moves blocks.", MOVEMENTS),
    Section(
        "engine",
        "Prefixes and residency",
        "What the cache saves, and how long it keeps.",
        PREFIXES_AND_RESIDENCY,
    ),
    Section(
        "queue",
        "Queue",
        "Exported by every worker of the queue and by `pagemill exporter`: take `max by (queue, model,"
        " priority)` before adding up. Absent while Redis does not answer: unknown is not 0. After the first"
        " 100 models the rest is one, `other`.",
        JOBS_AND_WORKERS,
    ),
    Section(
        "queue",
        "Rollouts",
        "By model and side (`stable` or `canary`); absent without a rollout. Every worker of a queue exports the same "
        "figures: `max` them before you sum.",
        ROLLOUTS,
    ),
    Section("queue", "The Redis server", "From INFO; absent where the server hides it.", SERVER),
    Section("worker", "Jobs", "What this worker made of the jobs it pulled.", JOBS),
    Section("worker", "Leases and commits", "Whether work is done once.", LEASES_AND_COMMITS),
    Section("worker", "Admission and Redis", "Why jobs are pulled or not.", ADMISSION_AND_REDIS),
    Section("engine", "Engine steps", "", STEPS),
    Section(
        "engine", "Requests in the engine", "Buckets are vLLM's, so that panels can be compared.", REQUESTS
    ),
    Section("engine", "Tokens and grammars", "", TOKENS),
    Section("engine", "Adapters", "LoRA adapters, by the names that jobs use.", ADAPTERS),
    Section("worker", "Worker", "", PROCESS),
    Section("scrape", "The scrape", "", SCRAPE_METRICS),
    Section(
        "gateway",
        "Gateway",
        "Exported by each `pagemill gateway`, and by nobody else. Routes are as the router writes them, `(none)` for"
        " what was refused before it had one; a series of a route begins with its first answer.",
        GATEWAY_METRICS,
    ),
)

CATALOGUE: tuple[Metric[Any], ...] = tuple(metric for section in SECTIONS for metric in section.metrics)

OF_WORKERS: tuple[Metric[Any], ...] = tuple(
    metric for section in SECTIONS if section.source != "gateway" for metric in section.metrics
)
