"""The queue's benchmarks in small: they measure what they say, and the affinity one shows a gain."""

from __future__ import annotations

import redis

from benchmarks.queues import affinity
from benchmarks.queues import rates as queue
from pagemill.producer.wire.server.transport import SyncTransport


def test_the_queue_is_measured_on_a_server_of_its_own() -> None:
    figures = queue.measure("valkey", jobs=400, waiting=500, pulls=3, rounds=1)
    assert {"submit_many", "submit"} <= set(figures.rates)
    assert all(rate > 0 for rates in figures.rates.values() for rate in rates)
    assert 500 < figures.bytes_per_job < 1200, "a waiting job with a 500-byte prompt"
    assert list(figures.pull_us) == ["nothing waiting", "16 waiting", "500 waiting"]
    assert queue.table([figures], 500).row_count >= 7


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
        assert times.indexed <= 300
        assert transport.client.zcard("pagemill:{affinity}:wait:1:2:affinity:echo") in (0, 300)
    transport.close()
