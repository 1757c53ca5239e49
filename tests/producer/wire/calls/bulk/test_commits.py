"""Commits in one call: each job finishes as with a separate call."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.calls import batches, transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import RedisRefused
from pagemill.producer.wire.server import scripts
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.job_queue import Connectivity, JobQueue
from tests.producer.driving import DECODE, Queue, error_json, result_json


def commit_of(queue: Queue, job: PulledJob, text: str = "ok", **options: Any) -> Call[Any]:
    body = result_json(job.job_id, text)
    return transitions.commit(queue.name, job.job_id, job.token, "succeeded", body, **options)


def together(queue: Queue, *calls: Call[Any]) -> list[str]:
    """Run the calls as one script; returns its replies, of which the last ones may be missing."""
    (pack,) = scripts.packed(calls)
    return [word.decode() for word in queue.run(scripts.joined(pack))]


def states(queue: Queue, batch_id: str) -> tuple[int, int, int, int]:
    found = queue.run(batches.counts(queue.name, batch_id))
    return found.total, found.running, found.succeeded, found.failed


def test_each_job_ends(queue: Queue) -> None:
    queue.submit("a", "b", "c", batch_id="batch")
    queue.submit("d", "e")
    a, b, c, d, e = sorted(queue.pull(), key=lambda job: job.job_id)
    failed = transitions.commit(queue.name, c.job_id, c.token, "failed", error_json=error_json())
    calls = [commit_of(queue, a, progress=DECODE), commit_of(queue, b), failed, commit_of(queue, d)]
    assert together(queue, *calls) == ["committed"] * 4
    assert [queue.state(job_id) for job_id in "abcde"] == [
        "succeeded",
        "succeeded",
        "failed",
        "succeeded",
        "running",
    ]
    assert states(queue, "batch") == (3, 0, 2, 1)
    counts = queue.client.hgetall(f"{queue.prefix}counts")
    assert (counts[b"running"], counts[b"succeeded"], counts[b"failed"]) == (b"1", b"3", b"1")
    assert queue.client.zrange(f"{queue.prefix}leases", 0, -1) == [e.job_id.encode()]
    assert queue.client.llen(f"{queue.prefix}bfeed:batch") == 3
    assert together(queue, *calls) == ["already_done"] * 4
    assert states(queue, "batch") == (3, 0, 2, 1)


def test_each_gets_its_own_word(queue: Queue) -> None:
    queue.submit("done", "stale", "cancelled", "good")
    jobs = {job.job_id: job for job in queue.pull()}
    queue.commit(jobs["done"])
    queue.release(jobs["stale"])
    queue.cancel("cancelled")
    words = together(
        queue, *(commit_of(queue, jobs[name]) for name in ("done", "stale", "cancelled", "good"))
    )
    assert words == ["already_done", "fenced", "cancelled", "committed"]


def test_equal_jobs_end_with_their_leaders(queue: Queue) -> None:
    for number in range(3):
        names = (f"lead{number}", f"f{number}", f"g{number}")
        queue.submit(*names, prompt=f"p{number}", dedupe=True, temperature=0.0, batch_id="batch")
    assert together(queue, *(commit_of(queue, job) for job in queue.pull())) == ["committed"] * 3
    assert states(queue, "batch") == (9, 0, 9, 0)
    assert queue.client.hget(f"{queue.prefix}counts", "queued") == b"0"


def test_a_failure_leaves_the_counts_right(queue: Queue) -> None:
    """The bad job's result key has another type: earlier jobs finish, later jobs finish by separate calls."""
    ids = [f"j{number:02}" for number in range(32)]
    queue.submit(*ids, batch_id="batch")
    jobs = sorted(queue.pull(32), key=lambda job: job.job_id)
    queue.client.lpush(f"{queue.prefix}stored", "no sorted set")
    calls = [commit_of(queue, job, stored="file:///x" if job.job_id == "j10" else "") for job in jobs]
    assert together(queue, *calls) == ["committed"] * 10
    assert states(queue, "batch") == (32, 22, 10, 0)
    found = queue.transport.run_each(calls)
    assert isinstance(found[10], RedisRefused)
    assert "WRONGTYPE" in str(found[10])
    assert found[:10] + found[11:] == ["already_done"] * 10 + ["committed"] * 21
    assert states(queue, "batch") == (32, 1, 31, 0)
    with pytest.raises(RedisRefused, match="WRONGTYPE"):
        queue.transport.run_many(calls)
    assert queue.client.zrange(f"{queue.prefix}leases", 0, -1) == [b"j10"]


def test_no_call_ends_more_than_one_may(queue: Queue) -> None:
    """Cancelled primary jobs with duplicates: the last commits get no reply, and a worker resends them."""
    for number in range(8):
        names = (f"lead{number}", *(f"f{number}.{follower}" for follower in range(250)))
        queue.submit(*names, prompt=f"p{number}", dedupe=True, temperature=0.0)
    jobs = queue.pull()
    for job in jobs:
        queue.cancel(job.job_id)
    calls = [commit_of(queue, job) for job in jobs]
    words = together(queue, *calls)
    assert 1 < len(words) < 8
    assert set(words) == {"cancelled"}
    assert [queue.state(job.job_id) for job in jobs] == ["cancelled"] * len(words) + ["running"] * (
        8 - len(words)
    )
    worker = JobQueue(queue.url, queue.name, "w1", 60_000, Connectivity(WorkerCounters()))
    assert worker.run_many(calls) == ["already_done"] * len(words) + ["cancelled"] * (8 - len(words))
    assert worker.run_many(calls) == ["already_done"] * 8
    worker.close()
    assert queue.client.hget(f"{queue.prefix}counts", "queued") == b"2000"
