"""Waiters of a job: counted from submit to disconnect; the last one to leave ends it."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.errors import RedisRefused
from tests.producer.driving import Queue

KEYED = {"idempotency_key": "k", "ttl": 600.0}


def waiters(queue: Queue, job_id: str) -> list[str]:
    found = queue.client.hget(f"{queue.prefix}job:{job_id}", "waiters")
    return (found or b"").decode().split()


def test_the_only_waiter_ends_a_job(queue: Queue) -> None:
    queue.submit("queued", "other", waiter="w1")
    queue.submit("running", priority="high", waiter="w1")
    job = queue.pull_one()
    for replies in (["cancelled", "requested", "missing"], ["done", "requested", "missing"]):
        assert queue.hang_up("w1", "queued", "running", "unknown") == replies
    assert queue.commit(job) == "cancelled"
    assert [queue.state(name) for name in ("queued", "running", "other")] == [
        "cancelled",
        "cancelled",
        "queued",
    ]
    assert queue.hang_up("w1", "other", "other") == ["cancelled", "done"]


def test_the_last_of_several_waiters_ends_a_job(queue: Queue) -> None:
    queue.submit("a", waiter="w1", **KEYED)
    assert queue.submit("b", waiter="w2", **KEYED) == ["same"]
    assert queue.submit("b", waiter="w2", **KEYED) == ["same"], "it may be sent twice"
    assert waiters(queue, "a") == ["w1", "w2"]
    job = queue.pull_one()
    assert [queue.hang_up("w1", "a"), queue.hang_up("w1", "a")] == [["kept"], ["kept"]]
    assert queue.state("a") == "running"
    assert queue.submit("c", waiter="w1x", **KEYED) == ["same"], "a name that another begins with is another"
    assert queue.hang_up("w2", "a") == ["kept"]
    assert queue.hang_up("w1", "a") == ["kept"], "it has left already"
    assert queue.hang_up("w1x", "a") == ["requested"]
    assert queue.commit(job) == "cancelled"


def test_who_cannot_be_counted_keeps_a_job(queue: Queue) -> None:
    """A producer's own submit, before or after the others: the queue cannot detect when it stops waiting."""
    queue.submit("first", **KEYED)
    assert queue.submit("x", waiter="w1", **KEYED) == ["same"]
    assert queue.hang_up("w1", "first") == ["kept"]
    late = KEYED | {"idempotency_key": "late"}
    queue.submit("late", waiter="w1", **late)
    assert queue.submit("x", **late) == ["same"]
    assert queue.submit("y", waiter="w2", **late) == ["same"]
    assert queue.hang_up("w1", "late") + queue.hang_up("w2", "late") == ["kept", "kept"]
    assert [queue.commit(job) for job in queue.pull()] == ["committed", "committed"]


def test_another_request_under_the_key_waits_for_nothing(queue: Queue) -> None:
    queue.submit("a", waiter="w1", **KEYED)
    assert queue.submit("b", waiter="w2", prompt="another", **KEYED) == ["conflict"]
    assert queue.submit("b", prompt="another", **KEYED) == ["conflict"]
    assert waiters(queue, "a") == ["w1"]
    assert queue.hang_up("w1", "a") == ["cancelled"]


def test_more_waiters_than_are_counted_keep_a_job(queue: Queue) -> None:
    queue.submit("a", waiter="w0", **KEYED)
    for number in range(1, 200):
        assert queue.submit("b", waiter=f"{number:032}", **KEYED) == ["same"]
        assert queue.client.hstrlen(f"{queue.prefix}job:a", "waiters") <= 1024
    assert queue.hang_up("w0", "a") == ["kept"]
    assert queue.commit(queue.pull_one()) == "committed"


@pytest.mark.parametrize("name", [b'"a b"', b'"a-b"', b'""', b"1", b'"%b"' % (b"a" * 33)])
def test_a_bad_name_stores_nothing(queue: Queue, name: bytes) -> None:
    header = b'{"id":"a","lane":"1:1:t:m","cost":1,"waiters":%b}' % name
    with pytest.raises(RedisRefused, match="bad header"):
        queue.run(submissions.submit(queue.name, [Submission("a", header, b"{}")]))
    assert queue.names() == set()


def test_a_key_passes_from_a_job_that_is_to_end(queue: Queue) -> None:
    """Cancelled or past its deadline: a later submit gets a job that can produce a result, and keeps the key."""
    queue.submit("cancelled", **KEYED)
    dying = queue.pull_one()
    assert queue.cancel("cancelled") == "requested"
    assert queue.submit("second", **KEYED) == ["created"]
    assert queue.commit(dying) == "cancelled"
    assert queue.submit("x", **KEYED) == ["same"], "the end of the first has not freed the second's key"
    late = queue.pull_one()
    expire(queue, "second")
    assert queue.submit("third", **KEYED) == ["created"], "a deadline holds before a sweep has seen it"
    assert queue.fail(late, "expired") == "committed"
    assert queue.submit("x", **KEYED) == ["same"]
    expire(queue, "third")
    assert queue.submit("fourth", **KEYED) == ["created"], "so it does for one that waits"
    assert queue.state("third") == "expired"
    assert queue.commit(queue.pull_one()) == "committed"
    assert queue.submit("x", **KEYED) == ["same"]


def test_nobody_follows_or_replays_as_a_job_that_is_to_end(queue: Queue) -> None:
    equal = {"dedupe": True, "temperature": 0.0}
    queue.submit("lead", **equal)
    leader = queue.pull_one()
    queue.submit("follower", **equal)
    queue.cancel("lead")
    assert queue.submit("next", **equal) == ["created"]
    assert queue.pull_one().job_id == "next", "it need not wait until the leader's worker has heard"
    assert queue.commit(leader) == "cancelled"
    assert queue.pull_one().job_id == "follower"

    queue.submit("dead", max_attempts=1)
    assert queue.retry(queue.pull_one()) == "dead"
    assert replay(queue, "dead", "r1") == "created"
    queue.pull_one()
    assert replay(queue, "dead", "r2") == "same"
    queue.cancel("r1")
    assert replay(queue, "dead", "r2") == "created"


def test_the_count_goes_with_the_record(queue: Queue) -> None:
    queue.submit("a", waiter="w1", **KEYED)
    queue.submit("b", waiter="w2", **KEYED)
    before = queue.names()
    queue.hang_up("w1", "a")
    assert queue.names() == before, "it is kept in the record"
    assert queue.commit(queue.pull_one()) == "committed"
    assert queue.hang_up("w2", "a") == ["done"]
    assert 0 < queue.client.pttl(f"{queue.prefix}job:a") <= 86_400_000


def test_leaving_works_at_maxmemory(own_queue: Queue) -> None:
    own_queue.submit("a", waiter="w1", **KEYED)
    own_queue.submit("b", waiter="w2", **KEYED)
    own_queue.submit("c", waiter="w3", priority="high")
    job = own_queue.pull_one()
    own_queue.client.config_set("maxmemory-policy", "noeviction")
    own_queue.client.config_set("maxmemory", 1)
    assert own_queue.submit("d", waiter="w4", **KEYED) == ["same"]
    assert own_queue.hang_up("w1", "a") + own_queue.hang_up("w2", "a") == ["kept", "kept"]
    assert own_queue.hang_up("w4", "a") == ["cancelled"]
    assert own_queue.hang_up("w3", "c") == ["requested"]
    own_queue.client.config_set("maxmemory", 0)
    assert own_queue.commit(job) == "cancelled"


def expire(queue: Queue, job_id: str) -> None:
    queue.client.hset(f"{queue.prefix}job:{job_id}", "deadline", 1)


def replay(queue: Queue, dead_id: str, job_id: str) -> str:
    from pagemill.producer.wire.schema.job import Job

    job = Job.parse({"prompt": "hello", "model": "m"})
    item = submissions.prepare(job, job_id, replay_of=dead_id)
    return queue.run(submissions.submit(queue.name, [item]))[0].status
