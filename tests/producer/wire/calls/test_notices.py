"""The notification of a finished job keeps its content, even if the job is freed in the meantime."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import batches, dead_letters, outbox, reads, registry
from pagemill.producer.wire.calls.submissions import prepare, submit
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue

HOOK = {"webhook": "https://example.com/x"}


def notices(queue: Queue, relay: str = "") -> list[outbox.Notice]:
    return queue.run(outbox.claim(queue.name, 10, 1000, relay=relay))


def submit_relayed(queue: Queue, job_id: str, batch_id: str) -> None:
    job = Job.parse({"prompt": "hello", "model": "m"} | HOOK)
    item = prepare(job, job_id, relay="celery")
    queue.run(submit(queue.name, [item], batch_id=batch_id))


def test_acknowledging_a_batch_loses_no_notice(queue: Queue) -> None:
    queue.submit("a", "b", batch_id="B", **HOOK)
    for job in queue.pull():
        queue.commit(job, "text")
    assert queue.run(batches.ack(queue.name, "B", "e2", 0)) == (2, 2)
    assert queue.run(batches.page(queue.name, "B", 0, ordered=True)).items == [], "it was acknowledged"
    told = {notice.outcome.job_id: notice for notice in notices(queue)}
    assert {
        job_id: notice.outcome.result.text for job_id, notice in told.items() if notice.outcome.result
    } == {
        "a": "text",
        "b": "text",
    }
    assert queue.submit("a", batch_id="B") == ["exists"]
    for job_id, notice in told.items():
        assert queue.run(outbox.finish_delivery(queue.name, job_id, notice.tries, None))
        assert queue.run(reads.outcome(queue.name, job_id)).state is None, "now it is gone"
    assert not {name for name in queue.names() if name.startswith(("job:", "out:", "outbox"))}


def test_a_notice_outlives_a_failed_try_and_the_acknowledgement_after_it(queue: Queue) -> None:
    queue.submit("a", batch_id="B", **HOOK)
    queue.commit(queue.pull_one(), "text")
    (first,) = notices(queue)
    queue.run(outbox.finish_delivery(queue.name, "a", first.tries, 5000))
    queue.run(batches.ack(queue.name, "B", "s1", 0))
    queue.client.zadd(f"{queue.prefix}outbox", {"a": 1})
    (second,) = notices(queue)
    assert second.tries == 2
    assert second.outcome.result is not None


def test_a_webhook_and_a_relay_are_both_told(queue: Queue) -> None:
    submit_relayed(queue, "a", "B")
    queue.commit(queue.pull_one(), "text")
    queue.run(batches.ack(queue.name, "B", "e1", 0))
    (hook,) = notices(queue)
    assert queue.run(outbox.finish_delivery(queue.name, "a", hook.tries, None))
    (relayed,) = notices(queue, "celery")
    assert relayed.outcome.result is not None
    assert queue.run(outbox.finish_delivery(queue.name, "a", relayed.tries, None, relay="celery"))
    assert queue.run(reads.outcome(queue.name, "a")).state is None


@pytest.mark.parametrize("batch", [None, "B"])
def test_purging_a_dead_letter_loses_no_notice(queue: Queue, batch: str | None) -> None:
    queue.submit("a", batch_id=batch, max_attempts=1, **HOOK)
    assert queue.retry(queue.pull_one()) == "dead"
    assert queue.run(dead_letters.purge(queue.name, ["a"])) == 1
    assert queue.run(dead_letters.page(queue.name, 0)).letters == []
    assert queue.run(dead_letters.open_letters(queue.name, ["a"])) == [None] if batch is None else True
    (notice,) = notices(queue)
    assert notice.outcome.error is not None
    queue.run(outbox.finish_delivery(queue.name, "a", notice.tries, None))
    assert queue.run(reads.outcome(queue.name, "a")).state == (None if batch is None else "dead")


def test_an_end_stays_a_week_for_its_notice_and_a_day_after_it(queue: Queue) -> None:
    day = 86_400_000
    queue.submit("a", **HOOK)
    queue.commit(queue.pull_one())
    assert queue.client.pttl(f"{queue.prefix}out:a") > 6 * day
    (notice,) = notices(queue)
    queue.run(outbox.finish_delivery(queue.name, "a", notice.tries, None))
    assert day - 60_000 < queue.client.pttl(f"{queue.prefix}out:a") <= day


@pytest.mark.parametrize("relay", ["", "celery"])
def test_ids_that_nobody_claims_do_not_outlive_their_records_for_ever(queue: Queue, relay: str) -> None:
    """Workers must not send webhooks, or no relay runs."""
    box = f"{queue.prefix}outbox" + (f":{relay}" if relay else "")

    def end(*names: str) -> None:
        for name in names:
            submit_relayed(queue, name, "B") if relay else queue.submit(name, **HOOK)
            queue.commit(queue.pull_one())

    end(*(f"old-{i}" for i in range(5)), "kept")
    long_ago = queue.client.time()[0] * 1000 - 15 * 86_400_000
    queue.client.zadd(box, dict.fromkeys(queue.client.zrange(box, 0, -1), long_ago))
    queue.client.delete(*(f"{queue.prefix}job:old-{i}" for i in range(5)))
    end("new-1", "new-2", "new-3")
    assert {name.decode() for name in queue.client.zrange(box, 0, -1)} == {"kept", "new-1", "new-2", "new-3"}
    assert {n.outcome.job_id for n in notices(queue, relay)} == {"kept", "new-1", "new-2", "new-3"}


def test_a_claim_ends_after_so_many_bytes(valkey_queue: Queue) -> None:
    queue = valkey_queue
    queue.submit(*(f"j{i}" for i in range(6)), **HOOK)
    for job in queue.pull():
        queue.commit(job, "x" * (2 << 20))
    first, second = notices(queue), notices(queue)
    assert 1 <= len(first) <= 3
    assert {notice.outcome.job_id for notice in first}.isdisjoint(n.outcome.job_id for n in second)


def test_the_jobs_that_run_are_told_in_pages_and_by_relay(queue: Queue) -> None:
    submit_relayed(queue, "relayed", "B")
    queue.submit("a", "b", "waits")
    pulled = [queue.pull_one() for _ in range(3)]
    ran = {job.job_id for job in pulled}
    first = queue.run(registry.running(queue.name, 0, 2))
    rest = queue.run(registry.running(queue.name, first.looked, 2))
    assert (first.looked, rest.looked) == (2, 1)
    assert {*first.job_ids, *rest.job_ids} == ran
    assert queue.run(registry.running(queue.name, 0, 10, relay="celery")).job_ids == ["relayed"]
    queue.commit(next(job for job in pulled if job.job_id == "relayed"))
    assert queue.run(registry.running(queue.name, 0, 10, relay="celery")).job_ids == []


def test_reading_due_deliveries_claims_nothing_and_postpones_without_a_try(queue: Queue) -> None:
    queue.submit("a", "b", **HOOK)
    queue.submit("plain")
    for job in queue.pull():
        queue.commit(job, "text")
    read = outbox.read_due(queue.name, 10)
    pending = queue.run(read)
    assert (pending.due, pending.total, pending.expired) == (2, 2, 0)
    assert sorted((each.job_id, each.receiver) for each in pending.first) == [
        ("a", HOOK["webhook"]),
        ("b", HOOK["webhook"]),
    ]
    assert queue.run(read) == pending
    pending = queue.run(outbox.read_due(queue.name, 1, {"a": 60_000}))
    assert (pending.due, pending.total, [each.job_id for each in pending.first]) == (1, 2, ["b"])
    queue.client.zadd(f"{queue.prefix}outbox", {"a": 1})
    (notice,) = queue.run(outbox.claim(queue.name, 10, 60_000, job_ids=["a", "missing"]))
    assert (notice.outcome.job_id, notice.tries) == ("a", 1)
    assert queue.run(outbox.claim(queue.name, 10, 60_000, job_ids=["a"])) == [], "it is claimed"
    claimed_until = queue.client.zscore(f"{queue.prefix}outbox", "a")
    queue.run(outbox.read_due(queue.name, 1, {"a": 1}))
    assert queue.client.zscore(f"{queue.prefix}outbox", "a") == claimed_until, "a claim is not shortened"


def test_due_deliveries_of_a_relay_name_the_tenant(queue: Queue) -> None:
    submit_relayed(queue, "a", "B")
    queue.commit(queue.pull_one(), "text")
    (due,) = queue.run(outbox.read_due(queue.name, 10, relay="celery")).first
    assert due == outbox.Due("a", "default")


def test_reading_counts_the_deliveries_whose_record_expired(queue: Queue) -> None:
    queue.submit("a", "b", **HOOK)
    for job in queue.pull():
        queue.commit(job, "text")
    queue.client.delete(f"{queue.prefix}job:a")
    pending = queue.run(outbox.read_due(queue.name, 10))
    assert (pending.expired, pending.total, [each.job_id for each in pending.first]) == (1, 1, ["b"])
