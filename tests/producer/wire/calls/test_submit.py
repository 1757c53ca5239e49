"""submit: the stored data, the rejections, and the result of a second submit."""

from __future__ import annotations

import pytest

from pagemill.producer.wire.calls import submissions, transitions
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.errors import RedisRefused
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue


def test_submit_stores_the_payload_and_queues_in_order(queue: Queue) -> None:
    assert queue.submit("a", "b") == ["created", "created"]
    assert [(job.job_id, Job.from_payload(job.payload).prompt) for job in queue.pull()] == [
        ("a", "hello"),
        ("b", "hello"),
    ]


def test_submit_twice_is_one_job(queue: Queue) -> None:
    queue.submit("a")
    assert queue.submit("a") == ["exists"]
    assert len(queue.pull()) == 1


def test_submit_of_a_running_or_ended_id_changes_nothing(queue: Queue) -> None:
    queue.submit("a")
    job = queue.pull_one()
    assert queue.submit("a") == ["exists"]
    assert queue.state("a") == "running"
    queue.commit(job)
    assert queue.submit("a") == ["exists"]
    assert queue.pull() == []


def test_submit_takes_what_fits_under_the_limit(queue: Queue) -> None:
    job = Job.parse({"prompt": "p", "model": "m"})
    items = [submissions.prepare(job, job_id) for job_id in "abc"]
    replies = queue.run(submissions.submit(queue.name, items, limit=2))
    assert [reply.status for reply in replies] == ["created", "created", "full"]
    assert "job:c" not in queue.names()
    queue.pull()
    assert queue.run(submissions.submit(queue.name, items, limit=2))[2].status == "created"


def test_a_limit_of_the_queue_wins_over_the_producers(queue: Queue) -> None:
    queue.client.hset(f"{queue.prefix}meta", "limit", 1)
    assert queue.submit("a", "b") == ["created", "full"]


@pytest.mark.parametrize(
    "header",
    [
        b"no json",
        b"[]",
        b'{"id":"a","cost":1}',
        b'{"id":"a","lane":"1:9:t:m","cost":1}',
        b'{"id":"a b","lane":"1:1:t:m","cost":1}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"delay":"soon"}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"color":"red"}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"invalid":"{}"}',
        b'{"id":"a","lane":"1:1:t:m","cost":NaN}',
        b'{"id":"a","lane":"1:1:t:m","cost":Infinity}',
        b'{"id":"a","lane":"1:1:t:m","cost":-1}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"n":1000000000}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"key":true}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"affinity":"a b"}',
        b'{"id":"%b","lane":"1:1:t:m","cost":1}' % (b"a" * 65),
        b'{"id":"a","lane":"1:1:t:%b","cost":1}' % (b"m" * 650),
        b'{"id":"a","lane":"1:1:t:m","cost":1,"metadata":"%b"}' % (b"m" * 23_000),
        b'{"id":"a","lane":"1:1:t:m","cost":1,"idem":"other:k"}',
        b'{"id":"a","lane":"1:1:t:m","cost":1,"twin":"t2:k"}',
        b"[" * 5000,
    ],
)
def test_a_bad_header_stores_nothing_of_the_call(queue: Queue, header: bytes) -> None:
    good = submissions.prepare(Job.parse({"prompt": "p", "model": "m"}), "good")
    with pytest.raises(RedisRefused, match="bad header"):
        queue.run(submissions.submit(queue.name, [good, Submission("a", header, b"{}")]))
    assert queue.names() == set()


def test_a_delayed_job_waits_until_it_is_due(queue: Queue) -> None:
    queue.submit("a", delay=3600)
    assert queue.state("a") == "delayed"
    assert queue.pull() == []
    queue.make_due("a")
    assert queue.pull_one().job_id == "a"


def test_run_at_in_the_past_queues_at_once(queue: Queue) -> None:
    queue.submit("a", run_at=1.0)
    assert queue.state("a") == "queued"


def test_pull_says_when_the_next_delayed_job_is_due(queue: Queue) -> None:
    queue.submit("a", delay=3600)
    reply = queue.run(transitions.pull(queue.name, "w", ["m"], 1, 10))
    assert reply.next_due_ms is not None
    assert 3_500_000 < reply.next_due_ms <= 3_600_000
    assert queue.run(transitions.sweep(queue.name)).next_due_ms is not None


def test_an_idempotency_key_leads_to_the_same_job_until_it_fails(queue: Queue) -> None:
    assert queue.submit("a", idempotency_key="k") == ["created"]
    assert queue.submit("b", idempotency_key="k") == ["same"]
    job = queue.pull_one()
    assert queue.submit("b", idempotency_key="k") == ["same"]
    queue.fail(job)
    assert queue.submit("b", idempotency_key="k") == ["created"]
    assert queue.submit("c", idempotency_key="k") == ["same"]


def test_an_idempotency_key_answers_for_a_job_that_succeeded(queue: Queue) -> None:
    queue.submit("a", idempotency_key="k")
    queue.commit(queue.pull_one())
    assert queue.submit("b", idempotency_key="k") == ["same"]
    assert 0 < queue.client.pttl(f"{queue.prefix}idem:default:k") <= 86_400_000


def test_another_payload_under_the_key_is_a_conflict(queue: Queue) -> None:
    queue.submit("a", idempotency_key="k")
    assert queue.submit("b", idempotency_key="k", prompt="other") == ["conflict"]
    assert queue.submit("c", idempotency_key="k", tenant="someone-else", prompt="other") == ["created"]
