"""Orphaned records and their cost, and the registry and the statistics."""

from __future__ import annotations

from dataclasses import replace

from pagemill import Producer
from pagemill.producer.wire.calls import batches, reads, registry, submissions, transitions
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.schema.outputs import ErrorInfo, JobStatus, Output
from tests.producer.driving import DECODE, Queue, delta


def test_nothing_but_the_record_is_left_of_an_ended_job(queue: Queue) -> None:
    queue.submit("a", ttl=60.0, idempotency_key="k", metadata={"x": 1})
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1), progress=DECODE)
    queue.commit(job)
    queue.pull()
    queue.run(registry.unregister(queue.name, "w1"))
    kept = {name for name in queue.names() if not name.startswith("started:")}
    assert kept == {"job:a", "out:a", "md:a", "idem:default:k", "meta", "counts", "usage:new"}


def test_an_input_is_kept_as_long_as_its_result_where_the_job_asks(queue: Queue) -> None:
    queue.submit("a", keep_input=True)
    queue.submit("b", batch_id="batch", keep_input=True)
    (kept,) = (job.payload for job in queue.pull() if queue.commit(job) and job.job_id == "a")
    found = queue.run(reads.recorded(queue.name, "a"))
    assert (found.payload, found.outcome is not None) == (kept, True)
    assert b"keep" not in kept
    names = [f"{queue.prefix}{kind}:a" for kind in ("in", "out", "job")]
    ages = [queue.client.pttl(name) for name in names]
    assert max(ages) - min(ages) < 1000 < ages[0] <= 86_400_000
    assert "in:b" in queue.names()
    assert queue.run(batches.ack(queue.name, "batch", "e1", 0))[0] == 1
    assert "in:b" not in queue.names()


def test_of_an_equal_job_that_shares_an_end_the_input_is_kept_too(queue: Queue) -> None:
    queue.submit("a", "b", keep_input=True, dedupe=True, temperature=0.0)
    queue.commit(queue.pull_one())
    payloads = {queue.run(reads.recorded(queue.name, job_id)).payload for job_id in "ab"}
    assert payloads == {queue.run(reads.recorded(queue.name, "a")).payload}
    assert b"" not in payloads


def test_what_has_not_ended_has_no_recorded_end(queue: Queue) -> None:
    queue.submit("a")
    waiting, unknown = (queue.run(reads.recorded(queue.name, job_id)) for job_id in ("a", "nobody"))
    assert waiting.outcome is not None
    assert (waiting.outcome.state, waiting.outcome.value()) == ("queued", None)
    assert Job.from_payload(waiting.payload).model == "m"
    assert waiting.submitted_at > 0
    assert unknown.outcome is not None
    assert (unknown.outcome.state, unknown.payload) == (None, b"")


def test_a_sample_of_a_batch_leaves_out_what_is_gone(queue: Queue) -> None:
    queue.submit("a", "b", "c", batch_id="batch")
    assert queue.run(batches.sample(queue.name, "batch", [2, 0, 7])) == ["c", "a"]
    assert queue.run(batches.sample(queue.name, "nothing", [0])) == []


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
    queue.run(registry.unregister(queue.name, "w1"))
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
    queue.run(submissions.submit(queue.name, [submissions.prepare(job, "a")]))
    assert Job.from_payload(queue.pull_one(cost=0).payload) == job


def test_a_reply_of_statuses_is_bounded(queue: Queue) -> None:
    """Errors with a MiB of partial output are not sent, and content that is too long is split into several replies."""
    ids = [f"j{number}" for number in range(100)]
    queue.submit(*ids, metadata={"text": "m" * 16_000})
    for job in queue.pull(100):
        output = Output(index=0, text="x" * (1_000_000 if job.job_id < "j2" else 1))
        error = ErrorInfo(code="engine_error", message="\u00e9" * 3_000, partial=(output,))
        queue.run(
            transitions.commit(
                queue.name, job.job_id, job.token, "failed", error_json=error.model_dump_json()
            )
        )
    sizes = []
    found: list[JobStatus | None] = []
    while len(found) < len(ids):
        call = reads.statuses(queue.name, ids[len(found) :])
        rows = queue.transport.run(replace(call, parse=list))
        sizes.append(sum(len(value) for row in rows for value in row if isinstance(value, bytes)))
        found += call.parse(rows)
    assert len(sizes) == 2
    assert max(sizes) < 1.1 * 2**20
    assert [status.id for status in found if status is not None] == ids
    for status in found:
        assert status is not None
        assert status.error is not None
        assert 2_000 < len(status.error) < 2_048
        assert set(status.error) == {"\u00e9"}
    with Producer(queue.url, queue=queue.name) as producer:
        assert [status.id for status in producer.statuses(ids)] == ids
