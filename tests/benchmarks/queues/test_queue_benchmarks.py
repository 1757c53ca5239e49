"""The queue's benchmarks in small: they measure what they say, and the affinity one shows a gain."""

from __future__ import annotations

import pytest
import redis

from benchmarks.queues import affinity, promises
from benchmarks.queues import rates as queue
from pagemill import Producer
from pagemill.producer.wire.server.transport import SyncTransport
from tests.worker.harness import eventually, running_worker, worker_config


@pytest.mark.slow
def test_the_queue_is_measured_on_a_server_of_its_own() -> None:
    words = "--jobs 400 --waiting 300 500 --pulls 3 --rounds 1 --workers 2 --at-once 16"
    figures = queue.measure("valkey", queue.parser().parse_args(words.split()))
    assert {"submit_many", "submit"} <= set(figures.rates)
    assert all(rate > 0 for rates in figures.rates.values() for rate in rates)
    assert all(cost.client_us > 0 for costs in figures.costs.values() for cost in costs)
    (drained,) = figures.drained
    assert drained.jobs == 400
    assert drained.rate > 0
    assert all(500 < taken < 1200 for taken in figures.bytes_per_job.values()), "prompts of some 500 bytes"
    assert list(figures.pull_us) == ["nothing waiting", "16 waiting", "300 waiting", "500 waiting"]
    assert queue.table([figures]).row_count >= 10
    told = [goal.as_json() for goal in queue.goals(figures)]
    assert queue.goal_table([figures]).row_count == len(told)
    assert {"pulls and commits a second >= 20000"} < {goal["goal"] for goal in told}
    assert all(goal["reached"] for goal in told)


@pytest.mark.slow
def test_affinity_finds_more_in_the_prefix_cache(valkey_url: str) -> None:
    backlog = affinity.Backlog(prefixes=24, jobs=192, prefix_tokens=512, question_tokens=32)
    transport = SyncTransport(redis.Redis.from_url(valkey_url))
    for workers in (1, 2):
        fleet = affinity.Fleet(workers, num_seqs=8)
        plain, window, index = (
            affinity.measure(backlog, fleet, transport, order) for order in affinity.ORDERS
        )
        assert plain.prompt_tokens == window.prompt_tokens == index.prompt_tokens
        assert plain.hit_tokens < window.hit_tokens
        assert index.hit_tokens > 1.2 * window.hit_tokens
        assert plain.largest_wait == 0
        assert 0 < index.largest_wait < backlog.jobs
    transport.close()


def test_pulls_are_timed_beside_a_queue_that_stays_as_full(valkey_url: str) -> None:
    transport = SyncTransport(redis.Redis.from_url(valkey_url))
    for order in affinity.ORDERS:
        times = affinity.time_pulls(transport, order, waiting=300, pulls=10, prefixes=8)
        assert 0 < times.median <= times.longest
        assert times.processor > 0
        assert times.indexed <= 300
        assert transport.client.zcard("pagemill:{affinity}:wait:1:2:affinity:echo") in (0, 300)
    transport.close()


def test_loads_come_as_they_say() -> None:
    load = promises.Load(rows=4, rate=2.0, jobs=0)
    times = [at for at, _ in zip(load.steady(), range(1000), strict=False)]
    assert 700 < times[-1] < 800, "1,000 jobs at two thirds of 2 a second"
    bursts = [at for at, _ in zip(load.bursts(), range(36), strict=False)]
    assert bursts == [0.0] * 12 + [9.0] * 12 + [18.0] * 12
    both = [at for at, _ in zip(load.both(), range(100), strict=False)]
    assert both == sorted(both)
    assert both.count(0.0) == 12


@pytest.mark.slow
def test_promises_are_scored_against_the_ends(valkey_url: str, queue_name: str) -> None:
    with (
        running_worker(worker_config(valkey_url, queue_name)) as worker,
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        promises.warm_up(producer, "echo", 4)
        eventually(lambda: worker_speed(producer), "the worker's speed")
        load = promises.Load(4, 200.0, 40)
        found = promises.summary(promises.scores(producer, "echo", load.steady(), load.jobs))
        assert found["jobs"] == 40
        assert 0 <= found["by_p50"] <= found["by_p90"] <= 1
        assert found["median_p50_s"] <= found["median_p90_s"]
        assert sum(worker.counters.promises.read().values()) >= 40


def worker_speed(producer: Producer) -> bool:
    promise = producer.submit(prompt="x", model="echo", max_tokens=1, promise="flag").promise
    return promise is not None and promise.p50 is not None
