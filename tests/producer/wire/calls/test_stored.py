"""Files of the store in Redis: their owners, and when they become orphans."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagemill.producer.wire.calls import batches, dead_letters, stored, submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue, result_json

URI = "s3://bucket/in/a"
HOUR_MS, DAY_MS = 3_600_000, 86_400_000


def submission(job_id: str, uri: str = URI, **fields: object) -> Submission:
    item = submissions.prepare(Job.parse({"prompt": "hello", "model": "m", **fields}), job_id)
    header = item.header.replace(b'"lane":"1:', b'"lane":"1+store:')
    return replace(item, header=b'%b,"stored":"%b"}' % (header[:-1], uri.encode()))


def submit(queue: Queue, job_id: str, uri: str = URI, batch_id: str | None = None, **fields: object) -> str:
    call = submissions.submit(queue.name, [submission(job_id, uri, **fields)], batch_id=batch_id)
    return queue.run(call)[0].status


def deadlines(queue: Queue) -> dict[str, float]:
    """Milliseconds until each file's deletion."""
    seconds, micros = queue.client.time()
    now = seconds * 1000 + micros / 1000
    found = queue.client.zrange(f"{queue.prefix}stored", 0, -1, withscores=True)
    return {uri.decode(): at - now for uri, at in found}


def commit(queue: Queue, token: int, job_id: str, uri: str) -> str:
    call = transitions.commit(
        queue.name, job_id, token, "succeeded", result_json=result_json(job_id), stored=uri
    )
    return queue.run(call)


def test_a_submit_takes_what_was_announced_and_an_end_gives_it_back(queue: Queue) -> None:
    queue.run(stored.announce(queue.name, [URI, "s3://bucket/in/b"]))
    assert all(HOUR_MS - 60_000 < left <= HOUR_MS for left in deadlines(queue).values())
    assert submit(queue, "a") == "created"
    assert set(deadlines(queue)) == {"s3://bucket/in/b"}
    assert submit(queue, "a", "s3://bucket/in/b") == "exists"
    assert set(deadlines(queue)) == {"s3://bucket/in/b"}
    assert queue.pull() == [], "without a store"
    job = queue.pull_one(has_store=True)
    queue.run(stored.announce(queue.name, ["s3://bucket/out/a"]))
    assert commit(queue, job.token, "a", "s3://bucket/out/a") == "committed"
    left = deadlines(queue)
    assert left[URI] <= 0
    assert DAY_MS - 60_000 < left["s3://bucket/out/a"] <= DAY_MS


def test_a_kept_input_stays_with_its_result(queue: Queue) -> None:
    submit(queue, "a", keep_input=True)
    queue.commit(queue.pull_one(has_store=True))
    assert DAY_MS - 60_000 < deadlines(queue)[URI] <= DAY_MS


def test_a_full_queue_does_not_let_the_hour_pass(queue: Queue) -> None:
    queue.submit("first")
    queue.client.hset(f"{queue.prefix}meta", "limit", 1)
    queue.run(stored.announce(queue.name, [URI], within_ms=1000))
    assert submit(queue, "a") == "full"
    assert deadlines(queue)[URI] > HOUR_MS - 60_000


@pytest.mark.parametrize("end", ["cancelled", "failed", "dead"])
def test_other_ends_keep_the_payload_as_long_as_the_record(queue: Queue, end: str) -> None:
    submit(queue, "a", max_attempts=1)
    if end == "cancelled":
        queue.cancel("a")
    elif end == "failed":
        queue.fail(queue.pull_one(has_store=True))
    else:
        queue.retry(queue.pull_one(has_store=True))
    days = 14 if end == "dead" else 1
    assert days * DAY_MS - 60_000 < deadlines(queue)[URI] <= days * DAY_MS
    if end == "dead":
        queue.run(dead_letters.purge(queue.name, ["a"]))
        assert deadlines(queue)[URI] <= 0


def test_a_dead_letter_of_a_batch_gives_its_payload_back_when_it_is_purged(queue: Queue) -> None:
    submit(queue, "a", batch_id="batch", max_attempts=1)
    queue.retry(queue.pull_one(has_store=True))
    assert deadlines(queue) == {}
    queue.run(dead_letters.purge(queue.name, ["a"]))
    assert deadlines(queue)[URI] <= 0


def test_a_batch_gives_its_files_back_when_it_is_acknowledged(queue: Queue) -> None:
    submit(queue, "a", batch_id="batch")
    job = queue.pull_one(has_store=True)
    commit(queue, job.token, "a", "s3://bucket/out/a")
    assert set(deadlines(queue)) == {URI}
    queue.run(batches.ack(queue.name, "batch", "e1", 0))
    assert all(left <= 0 for left in deadlines(queue).values())
    assert set(deadlines(queue)) == {URI, "s3://bucket/out/a"}


def test_a_shared_result_is_given_back_by_the_last(queue: Queue) -> None:
    for job_id in ("d", "e"):
        fields = {"prompt": "x", "model": "m", "temperature": 0.0, "dedupe": True}
        item = submissions.prepare(Job.parse(fields), job_id)
        queue.run(submissions.submit(queue.name, [item], batch_id="twins"))
    job = queue.pull_one()
    assert job.job_id == "d"
    commit(queue, job.token, "d", "s3://bucket/out/d")
    queue.run(batches.ack(queue.name, "twins", "e1", 0))
    assert "s3://bucket/out/d" not in deadlines(queue)
    queue.run(batches.ack(queue.name, "twins", "e2", 1))
    assert deadlines(queue)["s3://bucket/out/d"] <= 0


def test_a_lost_race_leaves_the_file_of_the_winner(queue: Queue) -> None:
    queue.submit("a")
    stale = queue.pull_one(worker="stale")
    queue.lapse("a")
    live = queue.pull_one(worker="live")
    uris = ["s3://bucket/out/stale", "s3://bucket/out/live"]
    queue.run(stored.announce(queue.name, uris))
    assert commit(queue, live.token, "a", uris[1]) == "committed"
    assert commit(queue, stale.token, "a", uris[0]) == "fenced"
    assert deadlines(queue)[uris[0]] <= HOUR_MS < deadlines(queue)[uris[1]]


def test_what_is_claimed_comes_again_unless_it_is_settled(queue: Queue) -> None:
    uris = [f"s3://bucket/in/{number}" for number in range(3)]
    queue.run(stored.announce(queue.name, uris, within_ms=0))
    assert set(queue.run(stored.claim(queue.name, 2, 60_000))) == set(uris[:2])
    assert queue.run(stored.claim(queue.name, 2, 60_000)) == uris[2:]
    assert queue.run(stored.claim(queue.name, 2, 60_000)) == []
    assert queue.run(stored.forget(queue.name, uris[:1])) == 1
    queue.run(stored.announce(queue.name, uris[1:], within_ms=0))
    assert set(queue.run(stored.claim(queue.name, 64, 0))) == set(uris[1:])


def test_a_clock_that_was_set_back_does_not_keep_files_for_ever(queue: Queue) -> None:
    queue.client.zadd(f"{queue.prefix}stored", {URI: 9e15})
    assert queue.run(stored.claim(queue.name, 64, 60_000)) == [URI]


def test_a_stored_job_with_an_adapter_is_pulled_from_its_lane(queue: Queue) -> None:
    submit(queue, "a", adapter="red")
    assert queue.pull(models=("m",), has_store=True) == []
    (job,) = queue.pull(models=("m", "m#red"), has_store=True)
    assert job.job_id == "a"
