"""The exposition, read back with a parser as Prometheus would."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import replace

import pytest

from pagemill.engine.outputs import StepStats
from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.exporter import WorkerMetrics
from pagemill.monitoring.metrics.kv_cache import accounting_errors
from pagemill.monitoring.metrics.queue import OTHER_MODELS
from pagemill.monitoring.queue_figures import MAX_MODELS, QueueFigures, ServerFigures
from tests.monitoring.snapshots import engine_stats, kv_stats, metrics, scrape, value


def test_engine_figures_are_the_snapshots() -> None:
    samples = scrape(metrics(engine_stats()))
    assert value(samples, "kv_cache_capacity_blocks") == 10
    assert value(samples, "kv_cache_utilization_ratio") == pytest.approx(0.3)
    assert value(samples, "kv_cache_peak_utilization_ratio") == pytest.approx(0.7)
    assert value(samples, "kv_cache_occupancy_ratio") == pytest.approx(0.5)
    assert value(samples, "kv_cache_waste_ratio") == pytest.approx(4 / 48)
    assert value(samples, "kv_cache_block_evictions_total") == 1
    assert value(samples, "prefix_cache_hit_tokens_total") == 64
    assert value(samples, "preemptions_total") == 4
    assert value(samples, "generated_tokens_total") == 123
    assert value(samples, "requests_completed_total", finish_reason="stop") == 5
    assert value(samples, "requests_completed_total", finish_reason="error") == 0
    assert value(samples, "requests_waiting", reason="budget") == 1
    assert value(samples, "requests_waiting", reason="kv") == 0
    assert value(samples, "worker_info", worker="w1", queue="labels", model="smollm2", version="1.2") == 1
    info = {"model": "smollm2", "device": "cpu", "tier": "token", "fingerprint": "f00"}
    assert value(samples, "engine_info", **info) == 1


def test_histograms_are_cumulative_and_end_at_their_count() -> None:
    samples = scrape(metrics(engine_stats()))
    buckets = [
        value(samples, "engine_step_seconds_bucket", phase="forward", kind="decode", le=le)
        for le in ("0.001", "0.01", "+Inf")
    ]
    assert buckets == [0, 3, 4]
    assert value(samples, "engine_step_seconds_count", phase="forward", kind="decode") == 4
    assert value(samples, "engine_step_seconds_sum", phase="forward", kind="decode") == pytest.approx(1.015)
    assert value(samples, "kv_cache_step_utilization_ratio_bucket", le="0.5") == 1


def test_every_series_of_engine_and_worker_is_there_before_the_model_is() -> None:
    samples = scrape(metrics())
    for state in ("free", "cached", "active", "reserved"):
        assert value(samples, "kv_cache_blocks", state=state) == 0
    for outcome in ("succeeded", "failed", "cancelled", "expired", "dead"):
        assert value(samples, "jobs_finished_total", outcome=outcome) == 0
    assert value(samples, "result_commits_total", result="fenced") == 0
    assert value(samples, "worker_state", state="starting") == 1
    assert value(samples, "engine_last_step_timestamp_seconds") == 0


def test_queue_figures_by_model_and_priority() -> None:
    figures = QueueFigures(
        queue="labels", taken_at=1000.5,
        waiting={("small", "high"): 1, ("small", "low"): 4, ("large", "low"): 2},
        oldest_age_seconds={("small", "low"): 12.5}, delayed=2, running=3, leases=3, dead=7, submitted=30,
        ended={"succeeded": 11}, workers={"ready": 2}, serving={"small": 2, "idle": 1}, drain_seconds=8.5,
        server=ServerFigures(memory_used_bytes=1 << 20, evicted_keys=0),
    )  # fmt: skip
    samples = scrape(metrics(queue=figures))
    lane = {"queue": "labels", "model": "small"}
    assert value(samples, "queue_waiting_jobs", **lane, priority="low") == 4
    assert value(samples, "queue_waiting_jobs", **lane, priority="normal") == 0
    assert value(samples, "queue_waiting_jobs", queue="labels", model="idle", priority="high") == 0
    assert value(samples, "queue_oldest_job_age_seconds", **lane, priority="low") == 12.5
    assert value(samples, "queue_jobs", queue="labels", state="waiting") == 7
    assert value(samples, "queue_jobs", queue="labels", state="dead") == 7
    assert value(samples, "queue_submitted_jobs_total", queue="labels") == 30
    assert value(samples, "queue_ended_jobs_total", queue="labels", outcome="succeeded") == 11
    assert value(samples, "queue_ended_jobs_total", queue="labels", outcome="dead") == 0
    assert value(samples, "queue_leases", queue="labels") == 3
    assert value(samples, "queue_workers", queue="labels", state="ready") == 2
    assert value(samples, "queue_serving_workers", **lane) == 2
    assert value(samples, "queue_serving_workers", queue="labels", model="large") == 0
    assert value(samples, "queue_estimated_drain_seconds", queue="labels") == 8.5
    assert value(samples, "queue_scrape_timestamp_seconds", queue="labels") == 1000.5
    assert value(samples, "redis_memory_used_bytes", queue="labels") == 1 << 20
    assert not any(name == "pagemill_redis_memory_max_bytes" for name, _ in samples), "unknown is not 0"


def test_models_that_anybody_makes_up_do_not_make_series_without_bound() -> None:
    figures = QueueFigures(
        queue="labels",
        taken_at=1.0,
        waiting={(f"made-up-{i}", "normal"): 1 for i in range(MAX_MODELS + 20)} | {("served", "low"): 1},
        oldest_age_seconds={(f"made-up-{i}", "normal"): i for i in range(MAX_MODELS + 20)},
        serving={"served": 1},
    )
    samples = scrape(metrics(queue=figures))
    waiting = {dict(labels)["model"] for name, labels in samples if name == "pagemill_queue_waiting_jobs"}
    assert len(waiting) == MAX_MODELS + 1
    assert "served" in waiting
    other = {"queue": "labels", "model": OTHER_MODELS, "priority": "normal"}
    assert value(samples, "queue_waiting_jobs", **other) == 21
    total = sum(v for (name, _), v in samples.items() if name == "pagemill_queue_waiting_jobs")
    assert total == MAX_MODELS + 21


def test_jobs_of_a_model_past_the_limit_have_a_serving_worker() -> None:
    """Otherwise the alert for a missing worker fires for their common label."""
    names = [f"adapter-{i}" for i in range(MAX_MODELS + 20)]
    figures = QueueFigures(
        queue="labels",
        taken_at=1.0,
        waiting={(name, "normal"): 1 for name in names},
        serving=dict.fromkeys(names, 2),
    )
    samples = scrape(metrics(queue=figures))
    assert value(samples, "queue_serving_workers", queue="labels", model=OTHER_MODELS) == 2


def test_an_unknown_queue_is_absent_not_empty() -> None:
    names = {name for name, _ in scrape(metrics(engine_stats()))}
    assert not any(name.startswith("pagemill_queue_") for name in names)
    assert "pagemill_kv_cache_blocks" in names


def test_a_source_that_raises_costs_its_own_figures_only(caplog: pytest.LogCaptureFixture) -> None:
    def unreachable() -> QueueFigures:
        raise ConnectionError("Redis is away")

    source = WorkerMetrics(WorkerCounters(), engine_stats, unreachable)
    with caplog.at_level(logging.WARNING):
        samples = scrape(source)
    assert value(samples, "scrape_source_errors_total", source="queue") == 1
    assert value(samples, "scrape_source_errors_total", source="engine") == 0
    assert value(samples, "kv_cache_capacity_blocks") == 10
    assert "without the queue's figures" in caplog.text


def test_worker_counters_reach_the_exposition() -> None:
    counters = WorkerCounters()
    counters.jobs_received.inc("redelivered")
    counters.job_failures.inc("engine_error", 2)
    counters.admission_blocked_seconds.inc("kv", 0.25)
    counters.leases_lost.inc()
    counters.commit_seconds.observe(0.002)
    counters.state = "draining"
    counters.redis_up = True
    counters.results_buffered = 5
    samples = scrape(metrics(counters=counters))
    assert value(samples, "jobs_received_total", delivery="redelivered") == 1
    assert value(samples, "job_failures_total", code="engine_error") == 2
    assert value(samples, "admission_blocked_seconds_total", reason="kv") == 0.25
    assert value(samples, "leases_lost_total") == 1
    assert value(samples, "result_commit_seconds_count") == 1
    assert value(samples, "worker_state", state="draining") == 1
    assert value(samples, "worker_state", state="starting") == 0
    assert value(samples, "redis_up") == 1
    assert value(samples, "redis_result_buffer_jobs") == 5


def test_a_label_value_nobody_declared_is_counted_as_other() -> None:
    counters = WorkerCounters()
    counters.job_failures.inc("a_code_of_next_year", 3)
    samples = scrape(metrics(counters=counters))
    assert value(samples, "job_failures_total", code="other") == 3
    assert not any(("code", "a_code_of_next_year") in labels for _, labels in samples)


def test_the_last_steps_time_does_not_move_between_scrapes() -> None:
    stats = engine_stats(steps=StepStats(last_time=time.monotonic() - 30))
    source = metrics(stats)
    first = value(scrape(source), "engine_last_step_timestamp_seconds")
    assert value(scrape(source), "engine_last_step_timestamp_seconds") == first
    assert time.time() - 60 < first < time.time() - 29


def test_process_and_python_figures_are_exported() -> None:
    names = {name for name, _ in scrape(metrics())}
    assert {"python_info", "process_resident_memory_bytes", "python_gc_collections_total"} <= names


@pytest.mark.parametrize(
    "broken",
    [
        {"free_blocks": 3}, {"shared_blocks": 4}, {"block_references": 2}, {"filled_slots": 49},
        {"free_blocks": -1, "cached_blocks": 7},
    ],
)  # fmt: skip
def test_accounts_that_do_not_add_up_are_counted_once_per_snapshot(
    broken: dict[str, int], caplog: pytest.LogCaptureFixture
) -> None:
    assert accounting_errors(kv_stats()) == []
    stats = engine_stats(kv=replace(kv_stats(), **broken))
    source = metrics(stats)
    with caplog.at_level(logging.CRITICAL):
        first = value(scrape(source), "kv_cache_accounting_errors_total")
        assert first >= 1
        assert value(scrape(source), "kv_cache_accounting_errors_total") == first


@pytest.mark.slow
def test_blocks_sum_to_the_capacity_while_snapshots_change() -> None:
    """Snapshots of different pools are swapped in as fast as a thread can; a scrape must never mix two."""
    snapshots = [
        engine_stats(kv=kv_stats(active=active, cached=cached, capacity=capacity))
        for capacity in (10, 64, 1000)
        for active in (0, 1, 5)
        for cached in (0, 3)
    ]
    current = [snapshots[0]]
    counters = WorkerCounters()
    done = threading.Event()

    def swap() -> None:
        i = 0
        while not done.is_set():
            i += 1
            current[0] = snapshots[i % len(snapshots)]
            counters.e2e_seconds.observe(i % 7)
            counters.jobs_finished.inc("succeeded")

    thread = threading.Thread(target=swap)
    thread.start()
    source = WorkerMetrics(counters, lambda: current[0], lambda: None)
    seen = set()
    finished = 0.0
    try:
        for _ in range(60):
            samples = scrape(source)
            capacity = value(samples, "kv_cache_capacity_blocks")
            states = [
                value(samples, "kv_cache_blocks", state=s) for s in ("free", "cached", "active", "reserved")
            ]
            assert sum(states) == capacity
            assert value(samples, "kv_cache_utilization_ratio") == states[2] / capacity
            assert value(samples, "kv_cache_accounting_errors_total") == 0
            inf = value(samples, "job_e2e_seconds_bucket", le="+Inf")
            assert value(samples, "job_e2e_seconds_count") == inf
            now = value(samples, "jobs_finished_total", outcome="succeeded")
            assert now >= finished
            finished = now
            seen.add((capacity, *states))
    finally:
        done.set()
        thread.join()
    assert len(seen) > 1, "the snapshots never changed: the test showed nothing"


def test_counts_lose_nothing_under_threads() -> None:
    counters = WorkerCounters()

    def count() -> None:
        for _ in range(5000):
            counters.jobs_finished.inc("succeeded")
            counters.leases_lost.inc()
            counters.attempts.observe(1)

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counters.jobs_finished.read()["succeeded"] == 20_000
    assert counters.leases_lost.read() == 20_000
    assert sum(counters.attempts.read().counts) == 20_000
