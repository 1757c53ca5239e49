"""Results of a worker that deviated are replaced, each once."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import audit, batches, outbox
from tests.producer.driving import Queue, result_json
from tests.producer.wire.calls.test_audit import committed, look, trail, vote


def accuse(queue: Queue, worker: str) -> None:
    vote(queue, "w8", "x")
    vote(queue, "w9", "x")
    assert vote(queue, worker, "y") == "deviates"


def settle(queue: Queue, job_id: str, text: str = "right", worker: str = "bad") -> str:
    body = result_json(job_id, text).encode()
    return queue.run(audit.replace_first(queue.name, worker, job_id, f"copy-{job_id}", body))


def test_a_result_is_replaced_once_and_everyone_hears_of_it(queue: Queue) -> None:
    look(queue, "bad")
    committed(queue, "bad", "a", "b", batch_id="batch", webhook="https://example.com/x")
    accuse(queue, "bad")
    (found,) = queue.run(audit.accused(queue.name))
    assert (found.worker, found.state, found.jobs, found.is_cut) == ("bad", "quarantined", 2, False)
    assert queue.run(audit.listed_jobs(queue.name, "bad", 10)) == ["a", "b"]
    for notice in queue.run(outbox.claim(queue.name, 8, 1)):
        queue.run(outbox.finish_delivery(queue.name, notice.outcome.job_id, notice.tries, None))

    assert settle(queue, "b") == "already_done", "jobs are settled in the order of the list"
    assert settle(queue, "a") == "superseded"
    assert settle(queue, "a", "again") == "already_done"
    assert (queue.result("a").text, queue.result("b").text) == ("right", "ok")
    page = queue.run(batches.page(queue.name, "batch", 2, ordered=False))
    assert [(item.id, item.superseded) for item in page.items] == [("a", True)]
    counts = queue.counts("batch")
    assert (counts.total, counts.succeeded) == (2, 2)
    (notice,) = queue.run(outbox.claim(queue.name, 8, 1000))
    assert (notice.outcome.job_id, notice.outcome.is_superseded, notice.tries) == ("a", True, 1)
    assert queue.client.ttl(f"{queue.prefix}out:b") - queue.client.ttl(f"{queue.prefix}out:a") < 5


def test_the_copys_worker_answers_for_the_new_result(queue: Queue) -> None:
    look(queue, "bad")
    committed(queue, "bad", "a")
    look(queue, "good")
    committed(queue, "good", "copy-a")
    accuse(queue, "bad")
    assert settle(queue, "a") == "superseded"
    assert [entry.split()[0] for entry in trail(queue, "good")] == ["copy-a", "a"]
    assert trail(queue, "bad") == []
    assert "in:a" in queue.names()


def test_a_job_that_was_freed_is_gone(queue: Queue) -> None:
    look(queue, "bad")
    committed(queue, "bad", "a", "b", batch_id="batch")
    queue.run(batches.ack(queue.name, "batch", "e1", 0))
    accuse(queue, "bad")
    assert settle(queue, "a") == "gone"
    assert queue.run(audit.replace_first(queue.name, "bad", "b")) == "left"
    assert queue.result("b").text == "ok"
    assert not any(name.startswith("in:") for name in queue.names())


@pytest.mark.parametrize("batch_id", ["batch", None])
def test_equal_jobs_are_replaced_one_by_one(queue: Queue, batch_id: str | None) -> None:
    look(queue, "bad")
    queue.submit("a", dedupe=True, seed=1, batch_id=batch_id)
    queue.submit("b", dedupe=True, seed=1, batch_id=batch_id)
    (job,) = queue.pull(worker="bad")
    queue.commit(job)
    accuse(queue, "bad")
    assert sorted(entry.split()[0] for entry in trail(queue, "bad")) == ["a", "b"]
    first, second = queue.run(audit.listed_jobs(queue.name, "bad", 10))
    assert settle(queue, first) == "superseded"
    assert (queue.result(first).text, queue.result(second).text) == ("right", "ok")
    assert settle(queue, second) == "superseded"
    assert queue.result(second).text == "right"
    if batch_id is not None:
        assert not any(name.startswith(("end:", "sharers:")) for name in queue.names())


def test_what_is_kept_stays_and_the_canaries_begin_anew(queue: Queue) -> None:
    look(queue, "bad")
    committed(queue, "bad", *(f"j{number}" for number in range(10)))
    accuse(queue, "bad")
    assert queue.run(audit.close(queue.name, "other", keep=True)) == 0
    assert queue.run(audit.close(queue.name, "bad", keep=True)) == 1
    assert queue.run(audit.accused(queue.name)) == []
    assert look(queue, "bad").state == "kept"
    assert trail(queue, "bad") == []
    assert not any(name.startswith("in:") for name in queue.names())
    assert vote(queue, "w1", "y") == "alone"
