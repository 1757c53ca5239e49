"""Batches: counts, results in both orders, cursors, reattaching, acknowledging, bad rows, expiry."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import BatchCounts, InvalidJob, Producer
from tests.producer.driving import Queue, delta
from tests.producer.scripted_worker import scripted_worker


def rows(count: int) -> list[dict[str, object]]:
    return [{"prompt": f"p{i}", "model": "m", "key": f"k{i}", "metadata": {"row": i}} for i in range(count)]


@pytest.mark.slow
def test_every_row_comes_back_once_with_key_and_metadata(queue: Queue, producer: Producer) -> None:
    with scripted_worker(queue.url, queue.name):
        batch = producer.submit_many(rows(600))
        items = list(batch.results())
    texts = {item.key: item.result.text for item in items if item.result}
    assert texts == {f"k{i}": f"p{i}" for i in range(600)}
    assert all(item.metadata == {"row": int(item.key[1:])} for item in items)
    assert batch.counts() == BatchCounts(total=600, succeeded=600)
    assert batch.wait(timeout=0) == batch.counts()


def test_ordered_results_keep_the_order_of_the_rows(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(rows(3))
    for job in reversed(queue.pull()):
        queue.commit(job)
    assert [item.key for item in batch.results(ordered=True)] == ["k0", "k1", "k2"]
    assert [item.key for item in batch.results()] == ["k2", "k1", "k0"]


def test_ends_come_as_they_happen_and_never_raise(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(
        [
            {"prompt": "good", "model": "m", "key": "good"},
            {"prompt": "fail", "model": "m", "key": "fail"},
            {"prompt": "", "model": "m", "key": "bad", "metadata": {"row": 3}},
            {"prompt": "die", "model": "m", "key": "die"},
            17,  # type: ignore[list-item]
        ]
    )
    with scripted_worker(queue.url, queue.name):
        items = {item.key: item for item in batch.results()}
    assert {key: item.state for key, item in items.items()} == {
        "good": "succeeded",
        "fail": "failed",
        "bad": "failed",
        "die": "dead",
        "invalid-4": "failed",
    }
    bad = items["bad"]
    assert bad.result is None
    assert bad.error is not None
    assert bad.error.code == "invalid_job"
    assert bad.metadata == {"row": 3}
    assert batch.counts() == BatchCounts(total=5, succeeded=1, failed=3, dead=1)
    assert producer.job(bad.id).status().state == "failed"


def test_reading_goes_on_from_a_cursor(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(rows(5))
    with scripted_worker(queue.url, queue.name):
        batch.wait(timeout=120)
    for ordered in (False, True):
        items = list(batch.results(ordered=ordered))
        rest = list(producer.batch(batch.id).results(ordered=ordered, after=items[1].cursor))
        assert rest == items[2:]
    with pytest.raises(InvalidJob):
        list(batch.results(ordered=True, after="e1"))
    with pytest.raises(InvalidJob):
        list(batch.results(after="17"))


def test_the_same_keys_attach_and_add_only_what_is_missing(queue: Queue, producer: Producer) -> None:
    producer.submit_many(rows(3), batch_id="b")
    with scripted_worker(queue.url, queue.name):
        producer.batch("b").wait(timeout=120)
    batch = producer.submit_many(rows(5), batch_id="b")
    assert batch.counts() == BatchCounts(total=5, succeeded=3, queued=2)


def test_without_keys_equal_rows_are_told_apart_by_their_occurrence(producer: Producer) -> None:
    same = [{"prompt": "p", "model": "m"}] * 3 + [{"prompt": "q", "model": "m"}]
    for _ in range(2):
        batch = producer.submit_many(same, batch_id="b")
    assert batch.counts().total == 4
    assert producer.submit_many([*same, {"prompt": "p", "model": "m"}], batch_id="b").counts().total == 5


def test_an_acknowledged_item_is_freed_and_not_run_again(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(rows(3), batch_id="b")
    with scripted_worker(queue.url, queue.name):
        items = list(batch.results())
    assert batch.ack(items[1].cursor) == 2
    assert batch.ack(items[1].cursor) == 0
    left = {name for name in queue.names() if name.startswith(("job:", "out:", "in:", "md:"))}
    assert left == {f"{kind}:{items[2].id}" for kind in ("job", "out", "md")}
    assert [item.id for item in batch.results()] == [items[2].id]
    assert [item.id for item in batch.results(ordered=True)] == [items[2].id]
    assert producer.submit_many(rows(3), batch_id="b").counts() == BatchCounts(total=3, succeeded=3)


def test_acknowledging_in_the_order_of_the_rows(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(rows(4))
    for job in reversed(queue.pull()):
        queue.commit(job)
    items = list(batch.results(ordered=True))
    assert batch.ack(items[2].cursor) == 3
    assert [item.key for item in batch.results()] == ["k3"]


def test_cancelling_a_batch_stops_what_has_not_ended(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many(rows(300))
    done, running = queue.pull(2)
    queue.commit(done)
    queue.checkpoint(running, delta(0, 1))
    assert batch.cancel() == 299
    assert batch.counts() == BatchCounts(total=300, succeeded=1, running=1, cancelled=298)
    assert queue.commit(running) == "cancelled"
    assert batch.cancel() == 0
    cancelled = [item for item in batch.results() if item.id == running.job_id]
    assert cancelled[0].error is not None
    assert cancelled[0].error.partial[0].token_ids == (1,)


def test_the_counts_follow_every_transition(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many([*rows(3), {"prompt": "p", "model": "m", "delay": 3600}])
    assert batch.counts() == BatchCounts(total=4, queued=3, delayed=1)
    a, b, c = queue.pull()
    queue.retry(a, 60)
    queue.release(b)
    queue.lapse(c.job_id)
    assert batch.counts() == BatchCounts(total=4, queued=1, delayed=2, running=1)
    queue.sweep()
    assert batch.counts() == BatchCounts(total=4, queued=2, delayed=2)


def test_an_empty_batch_is_done(producer: Producer) -> None:
    batch = producer.submit_many([])
    assert batch.wait(timeout=0).total == 0
    assert list(batch.results()) == []


def test_an_idempotency_key_has_no_place_in_a_batch(producer: Producer) -> None:
    batch = producer.submit_many([{"prompt": "p", "model": "m", "idempotency_key": "k"}])
    (item,) = batch.results()
    assert item.error is not None
    assert item.error.code == "unsupported_feature"


def test_a_batch_whose_time_is_over_leaves_nothing(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many([*rows(100), {"prompt": ""}])
    queue.client.zadd(f"{queue.prefix}bexpiry", {batch.id: 1})
    queue.sweep()
    assert batch.counts().queued == 100, "a batch that has not ended gets more time"
    with scripted_worker(queue.url, queue.name):
        batch.wait(timeout=120)
    queue.client.zadd(f"{queue.prefix}bexpiry", {batch.id: 1})
    for _ in range(3):
        queue.sweep()
    assert {
        name for name in queue.names() if not name.startswith(("bell:", "puller:", "started:", "usage"))
    } == {
        "meta",
        "counts",
    }


def test_rows_are_read_lazily_and_sent_in_bounded_chunks(queue: Queue, producer: Producer) -> None:
    depths = []

    def lazy() -> Iterator[dict[str, object]]:
        for i in range(600):
            depths.append(int(queue.client.hget(f"{queue.prefix}counts", "queued") or 0))
            yield {"prompt": f"p{i}", "model": "m"}

    producer.submit_many(lazy())
    assert all(depth % 250 == 0 for depth in depths)
    assert max(read - depth for read, depth in enumerate(depths)) <= 500, "one chunk in hand, one on its way"
