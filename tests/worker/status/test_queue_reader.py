"""The metrics of a queue in a scrape, from a real server."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pagemill.monitoring.counters import WorkerCounters
from pagemill.monitoring.metrics.queue_exposition import QueueExposition, QueueReadings
from pagemill.producer.wire.calls import rollouts, transitions
from pagemill.producer.wire.calls.registry import WorkerInfo, heartbeat
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.worker.job_queue import Connectivity, JobQueue, ServerClock
from pagemill.worker.status.queue_reader import QueueReader, server_figures
from tests.worker.harness import QueueClient


@pytest.fixture
def reader(client: QueueClient) -> Iterator[QueueReader]:
    queue = JobQueue(client.url, client.queue, "w", 1000, Connectivity(WorkerCounters()))
    yield QueueReader(queue, ServerClock())
    queue.close()


def test_an_empty_queue_has_figures_too(reader: QueueReader) -> None:
    figures = reader.read()
    assert (figures.submitted, figures.running, figures.dead, figures.paused) == (0, 0, 0, False)
    assert figures.models == ()
    assert figures.drain_seconds == 0.0


def test_jobs_are_counted_by_model_and_priority_and_over_tenants(
    client: QueueClient, reader: QueueReader
) -> None:
    client.submit(
        {"prompt": "a", "tenant": "one", "priority": "high"},
        {"prompt": "b", "tenant": "two", "priority": "high"},
        {"prompt": "c", "model": "other-model", "priority": "low"},
        {"prompt": "d", "delay": 1000},
    )
    client.cancel(*client.submit({"prompt": "e"}))
    client.pause()
    figures = reader.read()
    assert figures.queue == client.queue
    assert figures.waiting == {("echo", "high"): 2, ("other-model", "low"): 1}
    assert set(figures.oldest_age_seconds) == set(figures.waiting)
    assert min(figures.oldest_age_seconds.values()) >= 0
    assert (figures.delayed, figures.running, figures.leases) == (1, 0, 0)
    assert figures.submitted == 5
    assert figures.ended["cancelled"] == 1
    assert sum(figures.ended.values()) == 1
    assert figures.paused


def test_what_is_pulled_is_running_and_leased(client: QueueClient, reader: QueueReader) -> None:
    client.submit({"prompt": "a"}, {"prompt": "b"})
    client.run(transitions.pull(client.queue, "w", ["echo"], 1, 1000))
    figures = reader.read()
    assert (figures.running, figures.leases) == (1, 1)
    assert figures.waiting == {("echo", "normal"): 1}


def test_workers_are_counted_by_stage_and_only_ready_ones_serve(
    client: QueueClient, reader: QueueReader
) -> None:
    for number, state in enumerate(("ready", "ready", "loading", "draining", "a state of next year")):
        info = WorkerInfo(id=f"w{number}", models=("echo",), state=state)
        client.run(heartbeat(client.queue, info))
    figures = reader.read()
    stages = {
        "ready": 2, "loading": 1, "draining": 1, "unhealthy": 0, "paused": 0, "drained": 0, "quarantined": 0,
    }  # fmt: skip
    assert figures.workers == stages
    assert figures.serving == {"echo": 2}


@pytest.mark.slow
def test_the_drain_estimate_needs_ends(client: QueueClient, reader: QueueReader) -> None:
    job_ids = client.submit(*({"prompt": "a"} for _ in range(10)))
    assert reader.read().drain_seconds is None
    client.cancel(*job_ids[:5])
    time.sleep(1.1)
    estimate = reader.read().drain_seconds
    assert estimate is not None
    assert estimate > 1.0


def test_the_server_tells_how_it_is(reader: QueueReader) -> None:
    server = reader.read().server
    assert server is not None
    assert server.memory_used_bytes is not None
    assert server.memory_used_bytes > 100_000
    assert server.aof_enabled is True
    assert server.evicted_keys == 0
    assert server.connected_clients is not None
    assert server.connected_clients >= 1


def test_what_the_server_hides_is_unknown() -> None:
    hidden = server_figures({"redis_version": "7.0.15", "used_memory": 5, "maxmemory": "no number"})
    assert hidden.memory_used_bytes == 5
    assert hidden.memory_max_bytes is None
    assert hidden.aof_enabled is None


def test_a_canary_that_fails_too_often_is_told(client: QueueClient, reader: QueueReader) -> None:
    client.run(heartbeat(client.queue, WorkerInfo(id="new", models=("echo",), revision="r2")))
    client.run(rollouts.start(client.queue, "echo", Rollout("r2", 1.0, least=2)))
    client.submit(*({"prompt": f"{number}"} for number in range(2)))
    for job in client.run(transitions.pull(client.queue, "new", ["echo", "echo~r2"], 10, 10_000)).jobs:
        assert not reader.read().rollouts[0].is_failing
        error = ErrorInfo(code="engine_error", message="it broke").model_dump_json()
        client.run(transitions.commit(client.queue, job.job_id, job.token, "failed", error_json=error))
    (found,) = reader.read().rollouts
    assert (found.state, found.is_failing) == ("halted", True)
    client.run(rollouts.set_share(client.queue, "echo", 0.5))
    assert not reader.read().rollouts[0].is_failing


def test_a_rollout_is_told_by_side(client: QueueClient, reader: QueueReader) -> None:
    for worker, revision in (("old", "r1"), ("new", "r2")):
        client.run(heartbeat(client.queue, WorkerInfo(id=worker, models=("echo",), revision=revision)))
    client.run(rollouts.start(client.queue, "echo", Rollout("r2", 0.5, margin=1.0)))
    client.submit(*({"prompt": f"{number}"} for number in range(40)))
    for worker, models in (("old", ["echo"]), ("new", ["echo", "echo~r2"])):
        for job in client.run(transitions.pull(client.queue, worker, models, 10, 10_000)).jobs:
            error = ErrorInfo(code="engine_error", message="it broke").model_dump_json()
            client.run(transitions.commit(client.queue, job.job_id, job.token, "failed", error_json=error))
    client.run(rollouts.note_agreement(client.queue, "echo", 8, 6))
    client.run(rollouts.halt(client.queue, "echo"))
    readings = QueueReadings(queues=[reader.read()], redis_up=True, errors=0)
    exposition = QueueExposition(lambda: readings).render().decode()
    lines = [line for line in exposition.splitlines() if line.startswith("pagemill_queue_rollout_")]
    told = {line.partition("{")[0]: 0 for line in lines}
    assert set(told) == {
        f"pagemill_queue_rollout_{name}"
        for name in (
            "executions_total", "failures_total", "workers", "share_ratio", "state", "agreement_ratio",
            "failing",
        )
    }  # fmt: skip
    labels = f'{{model="echo",queue="{client.queue}"'
    for name, value in (
        (f"executions_total{labels},side=\"canary\"}}", 10), (f"failures_total{labels},side=\"stable\"}}", 10),
        (f"workers{labels},side=\"stable\"}}", 1), (f"share_ratio{labels}}}", 0.5),
        (f"state{labels},state=\"halted\"}}", 1), (f"agreement_ratio{labels}}}", 0.75), (f"failing{labels}}}", 0),
    ):  # fmt: skip
        assert f"pagemill_queue_rollout_{name} {float(value)}" in lines, lines
    assert not any("r2" in line for line in lines)
    assert reader.read().serving == {"echo": 2}  # pinned lanes are not models
