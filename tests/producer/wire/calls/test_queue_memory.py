"""A waiting job's cost to the server: counted in its memory, so independent of the machine's speed."""

from __future__ import annotations

from pathlib import Path
from typing import cast

import pytest
import redis

from benchmarks.queues.rates import rows
from benchmarks.queues.server import SYSTEM_KIND, kinds, start_server, used_memory
from pagemill import Producer

JOBS = 8000
"""Just below a power of two, where the server's key tables are nearly full."""


def submit(url: str, queue: str, model: str, jobs: int) -> None:
    """Submit on a connection that is closed afterwards: the server counts its buffers as used memory."""
    with Producer(url, queue=queue) as producer:
        producer.submit_many(row | {"model": model} for row in rows(jobs))


def bytes_per_job(url: str, queue: str, model: str) -> float:
    with redis.Redis.from_url(url) as client:
        submit(url, queue, model, 50)
        client.flushdb()
        before = used_memory(client)
        submit(url, queue, model, JOBS)
        assert client.zcard(f"pagemill:{{{queue}}}:wait:1:1:default:{model}") == JOBS
        return (used_memory(client) - before) / JOBS


LIMITS = {"valkey": (1080, 1095), "redis62": (1130, 1145), "redis7": (1150, 1190)}
"""Bytes, about 2% above the measurement: for a short queue and model name, and for usual ones."""


@pytest.mark.parametrize(
    "kind", [pytest.param(kind, marks=pytest.mark.slow) if kind == SYSTEM_KIND else kind for kind in LIMITS]
)
@pytest.mark.parametrize(
    ("queue", "model", "place"),
    [("bulk", "m", 0), ("default", "smollm2", 1)],
    ids=["as in the benchmark", "by default"],
)
def test_a_waiting_job_is_small(kind: str, queue: str, model: str, place: int, tmp_path: Path) -> None:
    """Its prompt has 500 bytes. 100,000 of them must stay under 120 MB."""
    if kind not in kinds():
        pytest.skip("this machine has no Redis 7")
    with start_server(kind, tmp_path) as url:
        assert 600 < bytes_per_job(url, queue, model) < LIMITS[kind][place]


class BusyServer:
    """Its disk is slow: the first replies include writes that wait in memory."""

    def __init__(self, *unwritten: int) -> None:
        self.unwritten = list(unwritten)

    def info(self) -> dict[str, int]:
        waiting = self.unwritten.pop(0)
        return {
            "aof_rewrite_in_progress": 0, "aof_rewrite_scheduled": 0, "aof_buffer_length": waiting,
            "lazyfree_pending_objects": 0, "used_memory": 1000 + waiting,
        }  # fmt: skip


def test_writes_that_wait_for_the_disk_are_not_counted() -> None:
    server = BusyServer(524_288, 4096, 0)
    assert used_memory(cast("redis.Redis", server)) == 1000
    assert not server.unwritten
