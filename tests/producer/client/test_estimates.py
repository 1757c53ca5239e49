"""Submits that request a completion estimate, with threads and with asyncio."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from pagemill import AsyncProducer, DeadlineUnreachable, Producer
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import Speed, WorkerInfo
from pagemill.producer.wire.store.store import Store
from tests.producer.driving import Queue


def announce(queue: Queue, *, rate: float = 10.0) -> None:
    """A worker that generates ten tokens per second in each of two batch slots."""
    speed = Speed(rows=2, busy_rate=rate, free_rate=rate)
    queue.run(registry.heartbeat(queue.name, WorkerInfo(id="w", models=("m",), speed=speed)))


def test_nothing_is_estimated_unless_it_is_asked_for(queue: Queue) -> None:
    announce(queue)
    with Producer(queue.url, queue=queue.name) as producer:
        handle = producer.submit(prompt="p", model="m")
    assert handle.estimate is None
    assert queue.client.hget(f"{queue.prefix}job:{handle.id}", "estimate") is None


def test_a_submit_says_when_its_job_will_end(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name) as producer:
        unknown = producer.submit(prompt="p", model="m", max_tokens=100, estimate="flag").estimate
        assert unknown is not None
        assert (unknown.p50, unknown.p90, unknown.misses_deadline) == (None, None, None)
        announce(queue)
        began = queue.client.time()[0]
        estimates = [
            producer.submit(prompt="p", model="m", max_tokens=100, estimate="flag").estimate for _ in range(4)
        ]
    ends = [(one.p50 or 0.0, one.p90 or 0.0) for one in estimates if one is not None]
    assert len(ends) == 4
    assert all(began + 5 < p50 < p90 for p50, p90 in ends)
    assert ends == sorted(ends), "who comes later ends later"
    assert all(job.estimate.startswith(("now:", "later:")) for job in queue.pull()[1:])


def test_a_deadline_that_will_be_missed_is_flagged_or_refused(queue: Queue) -> None:
    announce(queue)
    with Producer(queue.url, queue=queue.name) as producer:
        fields = {"prompt": "p", "model": "m", "max_tokens": 1000}
        flagged = producer.submit(fields | {"ttl": 20.0}, estimate="flag")
        assert flagged.estimate is not None
        assert flagged.estimate.misses_deadline
        assert producer.submit(fields | {"ttl": 2000.0}, estimate="refuse").status().state == "queued"
        assert producer.submit(fields, estimate="refuse").status().state == "queued"
        with pytest.raises(DeadlineUnreachable, match="after its deadline") as refused:
            producer.submit(fields | {"deadline": time.time() + 20}, estimate="refuse")
        assert refused.value.estimate.misses_deadline
        assert queue.client.hget(f"{queue.prefix}counts", "queued") == b"3"
        announce(queue, rate=1e6)
        assert producer.submit(fields | {"ttl": 20.0}, estimate="refuse").status().state == "queued"


def test_an_earlier_job_is_not_estimated_again(queue: Queue) -> None:
    announce(queue)
    with Producer(queue.url, queue=queue.name) as producer:
        first = producer.submit(prompt="p", model="m", seed=1, idempotency_key="k", estimate="flag")
        again = producer.submit(prompt="p", model="m", seed=1, idempotency_key="k", estimate="flag")
    assert first.estimate is not None
    assert (again.id, again.estimate) == (first.id, None)


def test_nothing_is_estimated_of_a_job_that_waits_for_others(queue: Queue) -> None:
    announce(queue)
    with Producer(queue.url, queue=queue.name) as producer:
        first = producer.submit(prompt="p", model="m", max_tokens=1000)
        handle = producer.submit(prompt="q", model="m", after=[first], ttl=1.0, estimate="refuse")
    assert handle.estimate is not None
    assert (handle.estimate.p50, handle.estimate.misses_deadline) == (None, None)


def test_jobs_in_a_store_wait_too(queue: Queue, tmp_path: Path) -> None:
    announce(queue)
    store = Store(f"file://{tmp_path}", 100)
    with Producer(queue.url, queue=queue.name, store=store) as producer:
        alone = producer.submit(prompt="p", model="m", max_tokens=10, estimate="flag").estimate
        for _ in range(20):
            producer.submit(prompt="large " * 50, model="m", max_tokens=1000)
        behind = producer.submit(prompt="p", model="m", max_tokens=10, estimate="flag").estimate
    assert alone is not None
    assert behind is not None
    assert (behind.p50 or 0.0) > (alone.p50 or 0.0) + 100


async def test_a_submit_of_asyncio_says_the_same(queue: Queue) -> None:
    announce(queue)
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        handle = await producer.submit(prompt="p", model="m", max_tokens=100, estimate="flag")
        assert handle.estimate is not None
        assert handle.estimate.p50 is not None
        with pytest.raises(DeadlineUnreachable):
            await producer.submit(prompt="p", model="m", max_tokens=1000, ttl=1.0, estimate="refuse")
