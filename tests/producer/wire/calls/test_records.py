"""Records left behind and their cost, and the registry and the statistics."""

from __future__ import annotations

from pagemill.producer.wire.calls import registry, transitions
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from tests.producer.driving import DECODE, Queue, delta


def test_nothing_but_the_record_is_left_of_an_ended_job(queue: Queue) -> None:
    queue.submit("a", ttl=60.0, idempotency_key="k", metadata={"x": 1})
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1), progress=DECODE)
    queue.commit(job)
    queue.pull()
    queue.run(registry.leave(queue.name, "w1"))
    assert queue.names() == {"job:a", "out:a", "md:a", "idem:default:k", "meta", "counts"}


def test_a_job_stays_compact_in_memory(queue: Queue) -> None:
    queue.submit("a", ttl=60.0)
    queue.checkpoint(queue.pull_one())
    assert queue.client.object("encoding", f"{queue.prefix}job:a") in (b"listpack", b"ziplist")


def test_workers_are_listed_while_they_live(queue: Queue) -> None:
    info = registry.WorkerInfo(id="w1", models=("m", "n"), url="http://127.0.0.1:9790")
    queue.submit("a")
    assert queue.status("a").error == "no live worker serves it (model m)"
    queue.run(registry.heartbeat(queue.name, info))
    assert queue.run(registry.workers(queue.name)) == [info]
    assert queue.status("a").error is None
    queue.run(registry.leave(queue.name, "w1"))
    assert queue.run(registry.workers(queue.name)) == []
    assert queue.status("a").error is not None
    assert not any(key.startswith(("serves:", "worker")) for key in queue.names())


def test_stats_tell_depth_and_age_by_lane(queue: Queue) -> None:
    queue.submit("a", "b", priority="high", tenant="t")
    queue.submit("c")
    queue.client.hset(f"{queue.prefix}job:a", "at", 1)
    stats = registry.stats(queue.run, queue.name)
    assert stats.waiting == {("high", "t", "m"): 2, ("normal", "default", "m"): 1}
    assert stats.oldest_s["high", "t", "m"] > 1e9
    assert (stats.counts["queued"], stats.leases, stats.dead, stats.paused) == (3, 0, 0, False)


def test_a_payload_at_the_limit_goes_through(queue: Queue) -> None:
    job = Job.parse({"prompt": "x" * (MAX_PAYLOAD_BYTES - 100), "model": "m"})
    queue.run(transitions.submit(queue.name, [transitions.prepare(job, "a")]))
    assert Job.from_payload(queue.pull_one(cost=0).payload) == job
