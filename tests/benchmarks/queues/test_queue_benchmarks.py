"""The queue's benchmarks in small: they measure what they say, and the affinity one shows a gain."""

from __future__ import annotations

from pathlib import Path

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


def test_affinity_finds_more_in_the_prefix_cache_and_bounds_the_wait(valkey_url: str, tmp_path: Path) -> None:
    backlog = affinity.Backlog(prefixes=6, jobs=120, prefix_tokens=512, question_tokens=32, seed=1)
    transport = SyncTransport(redis.Redis.from_url(valkey_url))
    plain, together = (
        affinity.measure(backlog, transport, with_affinity=choice, num_seqs=8, cached_prefixes=2)
        for choice in (False, True)
    )
    transport.close()
    assert together.prompt_tokens == plain.prompt_tokens
    assert together.hit_tokens > 1.2 * plain.hit_tokens
    assert plain.largest_wait == 0
    assert 0 < together.largest_wait <= 64 * 6
