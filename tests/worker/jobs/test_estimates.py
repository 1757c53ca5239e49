"""A worker measures its speed, announces it, and scores the estimates of the jobs that it finishes."""

from __future__ import annotations

import json
import uuid

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.calls.registry import Speed
from pagemill.producer.wire.schema.job import Job
from pagemill.worker.jobs.speed import MEMORY, SpeedMeter
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config


def test_rates_are_measured_apart_for_full_and_for_free_rows() -> None:
    meter = SpeedMeter()
    assert meter.speed(8) is None
    meter.ended(100, 5.0, 1.0)
    assert meter.speed(8) == Speed(rows=8, busy_rate=20.0, free_rate=20.0)
    meter.ended(100, 2.0, 0.25)
    assert meter.speed(8) == Speed(rows=8, busy_rate=20.0, free_rate=50.0)
    meter.ended(300, 5.0, 0.75)
    speed = meter.speed(8)
    assert speed is not None
    assert speed.busy_rate == pytest.approx((100 * MEMORY + 300) / (5 * MEMORY + 5))


def test_old_jobs_are_forgotten() -> None:
    meter = SpeedMeter()
    for _ in range(50):
        meter.ended(100, 10.0, 1.0)
    for _ in range(300):
        meter.ended(100, 1.0, 1.0)
    speed = meter.speed(8)
    assert speed is not None
    assert speed.busy_rate == pytest.approx(100.0, rel=0.01)


def submit_estimated(client: QueueClient, estimate: str) -> str:
    item = submissions.prepare(
        Job.parse({"prompt": "hello", "model": "echo", "max_tokens": 5}), uuid.uuid4().hex
    )
    header = json.loads(item.header) | {"estimate": estimate}
    again = submissions.Submission(item.job_id, json.dumps(header).encode(), item.payload)
    (reply,) = client.run(submissions.submit(client.queue, [again]))
    assert reply.status == "created"
    return item.job_id


@pytest.mark.slow
def test_estimates_are_scored_at_the_end(client: QueueClient) -> None:
    now = int(client.redis.time()[0]) * 1000
    hour = 3_600_000
    with running_worker(worker_config(client.url, client.queue)) as worker:
        kept = submit_estimated(client, f"now:{now}:{hour}:{hour}:{2 * hour}")
        nearly = submit_estimated(client, f"later:{now - hour}:{hour}:{hour // 2}:{2 * hour}")
        late = submit_estimated(client, f"later:{now - hour}:{hour}:1000:2000")
        strange = submit_estimated(client, f"soon:{now}:1:1:1")
        outcomes = client.wait([kept, nearly, late, strange])
        assert all(outcome.state == "succeeded" for outcome in outcomes)
        scores = eventually(
            lambda: worker.counters.estimates.read() == {"p50": 1, "p90": 1, "late": 1}, "the scores"
        )
        assert scores
        assert sum(worker.counters.estimate_ratio.read().counts) == 3
        client.wait(client.submit({"prompt": "no estimate"}))
        assert sum(worker.counters.estimates.read().values()) == 3


@pytest.mark.slow
def test_a_worker_announces_its_speed_and_a_submit_uses_it(client: QueueClient) -> None:
    with (
        running_worker(worker_config(client.url, client.queue)),
        Producer(client.url, queue=client.queue) as producer,
    ):
        (worker,) = eventually(client.workers, "its announcement")
        assert worker.speed is None
        assert (first := producer.submit(prompt="a", model="echo", estimate="flag").estimate)
        assert first.p50 is None
        client.wait(client.submit(*({"prompt": f"row {i}"} for i in range(20))))
        speed = eventually(lambda: client.workers()[0].speed, "its speed")
        assert speed.rows > 0
        assert speed.busy_rate > 0
        assert speed.free_rate > 0
        handle = producer.submit(prompt="b", model="echo", estimate="flag")
        assert handle.estimate is not None
        assert handle.estimate.p50 is not None
        handle.result(timeout=120)
