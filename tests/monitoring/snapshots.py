"""Snapshots to export, and a parser for an exposition."""

from __future__ import annotations

import time
from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from pagemill.engine.outputs import (
    EngineStats,
    Histogram,
    KVCacheStats,
    LoadedModel,
    RequestStats,
    SchedulerStats,
    StepStats,
)
from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.exporter import WorkerMetrics
from pagemill.monitoring.metrics.scrape import WorkerIdentity
from pagemill.monitoring.queue_figures import QueueFigures

Samples = dict[tuple[str, frozenset[tuple[str, str]]], float]


def kv_stats(active: int = 3, cached: int = 2, capacity: int = 10) -> KVCacheStats:
    return KVCacheStats(
        capacity_blocks=capacity,
        block_size=16,
        free_blocks=capacity - active - cached - 1,
        cached_blocks=cached,
        active_blocks=active,
        reserved_blocks=1,
        shared_blocks=min(active, 1),
        block_references=active + min(active, 1),
        filled_slots=active * 16 - 4 if active else 0,
        allocations=7,
        evictions=1,
        prefix_queried_tokens=100,
        prefix_hit_tokens=64,
    )


def engine_stats(**changes: object) -> EngineStats:
    step_seconds = Histogram((0.001, 0.01))
    step_seconds.observe(0.005, times=3)
    step_seconds.observe(1.0)
    utilization = Histogram((0.5, 1.0))
    utilization.observe(0.3)
    step_tokens = {(kind,): Histogram((8.0, 64.0)) for kind in ("prefill", "decode")}
    step_tokens["prefill",].observe(40)
    step_tokens["decode",].observe(4, times=2)
    stats = EngineStats(
        kv=kv_stats(),
        scheduler=SchedulerStats(running=2, waiting=1, preemptions=4, preempted_tokens=50),
        loaded=LoadedModel("smollm2", "cpu", "token", "f00", 2048, 64),
        steps=StepStats(finished=9, last_time=time.monotonic(), peak_utilization=0.7),
        requests=RequestStats(generated_tokens=123, finished={"stop": 5, "length": 1}),
        histograms={
            "step_seconds": {("forward", "decode"): step_seconds.snapshot()},
            "step_utilization": {(): utilization.snapshot()},
            "step_tokens": {kind: histogram.snapshot() for kind, histogram in step_tokens.items()},
        },
    )
    return replace(stats, **changes)  # type: ignore[arg-type]


def metrics(
    engine: EngineStats | None = None,
    queue: QueueFigures | None = None,
    counters: WorkerCounters | None = None,
    *,
    vllm_names: bool = False,
) -> WorkerMetrics:
    return WorkerMetrics(
        counters or WorkerCounters(),
        lambda: engine,
        lambda: queue,
        identity=WorkerIdentity(worker="w1", queue="labels", version="1.2"),
        vllm_names=vllm_names,
    )


def scrape(source: WorkerMetrics) -> Samples:
    families = text_string_to_metric_families(source.render().decode())
    return {(s.name, frozenset(s.labels.items())): s.value for f in families for s in f.samples}


def value(samples: Samples, name: str, **labels: str) -> float:
    return samples["pagemill_" + name, frozenset(labels.items())]
