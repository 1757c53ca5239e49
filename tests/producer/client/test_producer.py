"""Producer against real servers, with a scripted worker on the other side."""

from __future__ import annotations

import itertools
import os
import threading
from typing import Any
from uuid import uuid4

import pytest
import redis

from pagemill import (
    IdempotencyConflict,
    InvalidJob,
    Job,
    JobCancelled,
    JobDead,
    JobExpired,
    JobFailed,
    JobNotFound,
    Producer,
    QueueFull,
    RedisUnavailable,
    ResultExpired,
    ResultTimeout,
)
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.outputs import BatchCounts
from tests.producer.driving import Queue, delta
from tests.producer.scripted_worker import scripted_worker
from tests.worker.harness import eventually


def test_a_job_comes_back_with_its_result(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="hello", model="m", metadata={"row": 7})
    assert handle.status().state == "queued"
    with scripted_worker(queue.url, queue.name):
        result = handle.result(timeout=120)
    assert (result.id, result.text, result.token_ids, result.finish_reason) == (
        handle.id,
        "hello",
        (1, 2, 3),
        "stop",
    )
    status = handle.status()
    assert status.done
    assert status.metadata == {"row": 7}
    assert status.created_at <= (status.started_at or 0) <= (status.finished_at or 0)
    assert producer.job(handle.id).result() == result


@pytest.mark.parametrize("given", [Job(prompt="p", model="m"), {"prompt": "p", "model": "m"}])
def test_a_job_may_be_a_model_or_a_mapping_with_fields_on_top(producer: Producer, given: Job) -> None:
    status = producer.submit(given, priority="high").status()
    assert (status.priority, status.tenant) == ("high", "default")


def test_the_producers_tenant_is_the_default(queue: Queue) -> None:
    with Producer(queue.url, queue=queue.name, tenant="acme") as producer:
        assert producer.submit(prompt="p", model="m").status().tenant == "acme"
        assert producer.submit(Job(prompt="p", model="m")).status().tenant == "acme"
        assert producer.submit(Job(prompt="p", model="m", tenant="other")).status().tenant == "other"


def test_a_job_without_a_seed_gets_one(queue: Queue, producer: Producer) -> None:
    producer.submit(prompt="p", model="m")
    producer.submit(prompt="p", model="m")
    producer.submit(prompt="p", model="m", seed=5)
    first, second, third = (Job.from_payload(job.payload).seed for job in queue.pull())
    assert first is not None
    assert first != second
    assert third == 5


def test_a_submit_repeated_with_its_id_is_one_job(queue: Queue, producer: Producer) -> None:
    first = producer.submit(prompt="p", model="m", job_id="mine")
    assert producer.submit(prompt="p", model="m", job_id="mine").id == first.id
    assert len(queue.pull()) == 1


@pytest.mark.parametrize(
    "submit",
    [
        lambda p: p.submit(prompt="", model="m"),
        lambda p: p.submit("just text"),
        lambda p: p.submit(prompt="p", model="m", key="k"),
        lambda p: p.submit(prompt="p", model="m", job_id="no/id"),
        lambda p: p.job("no id"),
        lambda p: p.job(5),
        lambda p: p.job(None),
        lambda p: p.job(b"id"),
        lambda p: p.batch(uuid4()),
        lambda p: p.statuses([5]),
        lambda p: p.submit(prompt="p", model="m", job_id=uuid4()),
        lambda p: p.submit_many([], batch_id=uuid4()),
        lambda p: p.batch("b").ack(5),
        lambda p: Producer(queue=5),
        lambda p: Producer(tenant=5),
        lambda p: Producer(queue="no:queue"),
        lambda p: Producer(tenant="no:tenant"),
        lambda p: Producer(hmac_key="k"),
        lambda p: p.submit_many([{"prompt": ""}], on_invalid="raise"),
    ],
)
def test_a_caller_who_is_wrong_hears_it(producer: Producer, submit: object) -> None:
    with pytest.raises(InvalidJob, match=r"\w"):
        submit(producer)  # type: ignore[operator]


JOB: dict[str, Any] = {"prompt": "p", "model": "m", "key": "a"}
LARGE = "x" * 2_000_000
OTHERS: list[dict[str, Any]] = [
    {"prompt": "q"}, {"temperature": 0.5}, {"model": "other"}, {"max_tokens": 7}, {"prompt": ""}, {"prompt": LARGE},
    {"dedupe": True, "temperature": 0.0},
]  # fmt: skip


@pytest.mark.parametrize("other", OTHERS, ids=lambda other: next(iter(other.items()), ""))
@pytest.mark.parametrize("is_first", [True, False])
@pytest.mark.parametrize("is_one_call", [True, False])
def test_one_key_with_other_work_is_a_conflict(
    producer: Producer, other: dict[str, Any], is_first: bool, is_one_call: bool
) -> None:
    jobs = [JOB, JOB | other | {"metadata": {"row": 2}}]
    calls = [jobs if is_first else jobs[::-1]]
    if not is_one_call:
        calls = [[job] for job in calls[0]]
    for _ in range(2):  # on repeated calls, the same rows are the same items
        for call in calls:
            batch = producer.submit_many(call, batch_id="b")
    counts = batch.counts()
    is_invalid = other.get("prompt") in ("", LARGE)
    assert (counts.total, counts.failed) == (2, 1 if is_first or not is_invalid else 2)
    ends = {
        item.error.code: item.key for item in itertools.islice(batch.results(), counts.failed) if item.error
    }
    assert ends.pop("idempotency_conflict") == "a"
    assert len(ends) == counts.failed - 1


def test_the_same_work_under_a_key_is_one_item(queue: Queue, producer: Producer) -> None:
    for jobs in ([JOB, JOB], [JOB, Job(**JOB)], [JOB | {"metadata": {"row": 2}, "priority": "low"}]):
        batch = producer.submit_many(jobs, batch_id="b", on_invalid="raise")
    assert batch.counts() == BatchCounts(total=1, queued=1)
    queue.commit(queue.pull_one())
    assert producer.submit_many([JOB], batch_id="b", on_invalid="raise").counts().total == 1


def test_a_conflict_with_an_item_that_has_ended(queue: Queue, producer: Producer) -> None:
    producer.submit_many([JOB], batch_id="b")
    done = queue.pull_one()
    queue.commit(done)
    with pytest.raises(IdempotencyConflict, match="'a'") as caught:
        producer.submit_many([JOB | {"prompt": "q"}], batch_id="b", on_invalid="raise")
    assert caught.value.job_id == done.job_id
    assert producer.submit_many([JOB | {"prompt": "q"}], batch_id="b").counts().failed == 1


def test_many_rows_with_keys(producer: Producer) -> None:
    """More than a chunk, so that a row and its duplicate are in different calls."""
    rows = [{"prompt": f"p{i}", "model": "m", "key": f"k{i % 400}"} for i in range(800)]
    assert producer.submit_many(rows).counts() == BatchCounts(total=800, queued=400, failed=400)


def test_idempotency(producer: Producer) -> None:
    first = producer.submit(prompt="p", model="m", idempotency_key="k")
    assert producer.submit(prompt="p", model="m", idempotency_key="k").id == first.id
    with pytest.raises(IdempotencyConflict) as caught:
        producer.submit(prompt="q", model="m", idempotency_key="k")
    assert caught.value.job_id == first.id


def test_a_full_queue(queue: Queue, producer: Producer) -> None:
    queue.client.hset(f"{queue.prefix}meta", "limit", 1)
    producer.submit(prompt="p", model="m")
    with pytest.raises(QueueFull):
        producer.submit(prompt="p", model="m")
    with pytest.raises(QueueFull):
        producer.submit_many([{"prompt": "p", "model": "m"}], on_full="raise")


def test_one_submit_waits_for_room_when_asked_to(queue: Queue, producer: Producer) -> None:
    queue.client.hset(f"{queue.prefix}meta", "limit", 1)
    producer.submit(prompt="p", model="m")
    with scripted_worker(queue.url, queue.name):
        assert producer.submit(prompt="q", model="m", on_full="block").result(timeout=120).text == "q"


def test_a_payload_that_is_too_large_for_the_queue_fails_alone(queue: Queue, producer: Producer) -> None:
    queue.run(limits.set_limits(queue.name, limits.QueueLimits(payload_bytes=1000)))
    large, small = {"prompt": "x" * 2000, "model": "m", "metadata": {"row": 1}}, {"prompt": "p", "model": "m"}
    with pytest.raises(InvalidJob) as caught:
        producer.submit(large)
    assert caught.value.code == "payload_too_large"
    batch = producer.submit_many([small, large | {"key": "large"}, small])
    assert batch.counts() == BatchCounts(total=3, queued=2, failed=1)
    (item,) = (item for item in itertools.islice(batch.results(), 1))
    assert item.error is not None
    assert (item.key, item.metadata, item.error.code) == ("large", {"row": 1}, "payload_too_large")
    with pytest.raises(InvalidJob):
        producer.submit_many([small, large], on_invalid="raise")


@pytest.mark.slow
def test_a_deadline_passes_though_no_worker_lives(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m", ttl=0.2)
    batch = producer.submit_many([{"prompt": "p", "model": "m", "ttl": 0.2}])
    with pytest.raises(JobExpired):
        handle.result(timeout=120)
    assert batch.wait(timeout=120).expired == 1


def test_what_an_expired_batch_had_finished_is_delivered(queue: Queue, producer: Producer) -> None:
    batch = producer.submit_many({"prompt": f"p{i}", "model": "m", "ttl": 3600.0} for i in range(4))
    done, running, *_ = queue.pull(2)
    queue.commit(done, "in time")
    waiting = queue.client.zrange(f"{queue.prefix}deadlines", 0, -1)
    queue.client.zadd(f"{queue.prefix}deadlines", dict.fromkeys(waiting, 1))
    queue.sweep()
    assert queue.commit(running) == "expired"
    items = list(batch.results())
    assert sorted(item.state for item in items) == ["expired", "expired", "expired", "succeeded"]
    assert [item.result.text for item in items if item.result] == ["in time"]


@pytest.mark.slow
def test_submit_many_waits_for_room(queue: Queue, producer: Producer) -> None:
    queue.client.hset(f"{queue.prefix}meta", "limit", 2)
    with scripted_worker(queue.url, queue.name):
        batch = producer.submit_many({"prompt": f"p{i}", "model": "m"} for i in range(9))
        assert batch.wait(timeout=120).succeeded == 9


@pytest.mark.parametrize("error", [JobFailed, JobDead, JobExpired])
def test_an_end_without_a_result_raises_with_code_and_partial(
    queue: Queue, producer: Producer, error: type[JobFailed]
) -> None:
    handle = producer.submit(prompt="p", model="m")
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, 2, text="so far"))
    queue.fail(job, error.state)
    with pytest.raises(error) as caught:
        handle.result(timeout=120)
    assert (caught.value.code, caught.value.message) == ("invalid_job", "no good")
    assert caught.value.retryable is False
    assert [output.text for output in caught.value.partial] == ["so far"]


def test_cancel(producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m")
    assert handle.cancel() is True
    assert handle.cancel() is False
    with pytest.raises(JobCancelled):
        handle.result()


def test_a_wait_that_ends_first_leaves_the_job_alone(producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m")
    for timeout in (0, 0.02):
        with pytest.raises(ResultTimeout):
            handle.result(timeout=timeout)
    with pytest.raises(TimeoutError):
        producer.submit_many([{"prompt": "p", "model": "m"}]).wait(timeout=0.02)
    assert handle.status().state == "queued"


def test_unknown_and_removed_jobs(queue: Queue, producer: Producer) -> None:
    missing = producer.job("none")
    for look in (
        missing.status,
        missing.result,
        missing.cancel,
        missing.progress,
        lambda: list(missing.stream()),
    ):
        with pytest.raises(JobNotFound):
            look()
    batch = producer.batch("none")
    for look in (batch.counts, batch.wait, lambda: list(batch.results())):
        with pytest.raises(JobNotFound):
            look()
    handle = producer.submit(prompt="p", model="m")
    queue.commit(queue.pull_one())
    queue.client.delete(f"{queue.prefix}out:{handle.id}")
    with pytest.raises(ResultExpired):
        handle.result()


def test_statuses_of_many(producer: Producer) -> None:
    handles = [producer.submit(prompt="p", model="m") for _ in range(3)]
    assert [status.position for status in producer.statuses([h.id for h in handles])] == [0, 1, 2]


def test_many_threads_wait_on_one_listener(queue: Queue, producer: Producer) -> None:
    handles = [producer.submit(prompt=f"p{i}", model="m") for i in range(40)]
    texts: dict[int, str] = {}

    def wait(i: int) -> None:
        texts[i] = handles[i].result(timeout=120).text

    threads = [threading.Thread(target=wait, args=(i,)) for i in range(40)]
    for thread in threads:
        thread.start()
    subscribers = queue.client.execute_command("PUBSUB", "NUMSUB", f"{queue.prefix}ended")
    with scripted_worker(queue.url, queue.name):
        for thread in threads:
            thread.join()
    assert texts == {i: f"p{i}" for i in range(40)}
    assert subscribers[1] <= 1


def test_a_lost_hint_delays_and_never_hangs(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m")
    job = queue.pull_one()
    waiter = threading.Thread(target=handle.result)
    waiter.start()
    # Like a commit with a lost hint: the state changes without a notification.
    queue.client.set(f"{queue.prefix}out:{handle.id}", '{"id":"x","outputs":[{"index":0}],"model":"m"}')
    queue.client.hset(f"{queue.prefix}job:{handle.id}", "state", "succeeded")
    waiter.join(timeout=120)
    assert not waiter.is_alive()
    del job


def test_a_user_who_may_not_listen_gets_a_line(
    valkey_url: str, queue_name: str, caplog: pytest.LogCaptureFixture
) -> None:
    with redis.Redis.from_url(valkey_url) as admin:
        admin.execute_command("ACL", "SETUSER", queue_name, "on", "nopass", "~*", "resetchannels", "+@all")
    with Producer(valkey_url.replace("//", f"//{queue_name}:x@"), queue=queue_name) as producer:
        watched = producer._connected().listener.watch("job")
        eventually(lambda: caplog.records, "a line in the log")
        watched.close()
    assert "Redis denies this user" in caplog.text
    assert "Traceback" not in caplog.text


def test_a_producer_works_again_after_close(producer: Producer) -> None:
    producer.submit(prompt="p", model="m")
    producer.close()
    assert producer.submit(prompt="p", model="m").status().position == 1


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
def test_a_forked_child_has_connections_of_its_own(queue: Queue, producer: Producer) -> None:
    producer.submit(prompt="parent", model="m")
    pid = os.fork()
    if pid == 0:
        # The child must not run pytest's cleanup.
        code = 1
        try:
            producer.submit(prompt="child", model="m", job_id="child")
            code = 0
        finally:
            os._exit(code)
    producer.submit(prompt="parent", model="m")
    assert os.waitpid(pid, 0)[1] == 0
    assert producer.job("child").status().state == "queued"


@pytest.mark.slow
def test_no_server() -> None:
    with Producer("redis://127.0.0.1:1") as producer, pytest.raises(RedisUnavailable) as caught:
        producer.submit(prompt="p", model="m")
    assert caught.value.job_id is not None


def test_a_stream_tells_each_token_once_and_one_end(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m", stream=True)
    seen = threading.Event()

    def run(queue: Queue, job: PulledJob) -> None:
        queue.checkpoint(job, delta(0, 1, text="o"))
        assert seen.wait(120)
        queue.checkpoint(job, delta(1, 2, text="k"))
        queue.commit(job, "ok")

    with scripted_worker(queue.url, queue.name, run):
        events = []
        for event in handle.stream():
            events.append(event)
            seen.set()
    assert "".join(event.text for event in events) == "ok"
    assert [token for event in events for token in event.token_ids] == [1, 2, 3]
    assert [event.type for event in events].count("end") == 1
    assert (events[-1].type, events[-1].state) == ("end", "succeeded")


def test_a_late_reader_gets_a_snapshot(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m", stream=True)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, text="a"))
    queue.checkpoint(job, delta(1, 2, text="b"))
    stream = handle.stream()
    first = next(stream)
    assert (first.type, first.text, first.token_ids) == ("snapshot", "ab", (1, 2))
    queue.fail(job)
    assert [event.type for event in stream] == ["end"]
    queue_again = [event.type for event in handle.stream()]
    assert queue_again == ["snapshot", "end"]


def test_a_stream_begins_again_when_the_job_does(queue: Queue, producer: Producer) -> None:
    handle = producer.submit(prompt="p", model="m", stream=True)
    job = queue.pull_one()
    queue.checkpoint(job, delta(0, 1, text="a"))
    stream = handle.stream()
    assert next(stream).text == "a"
    queue.checkpoint(job, delta(0, 9, text="z"), restart=True)
    event = next(stream)
    assert (event.type, event.text, event.token_ids) == ("snapshot", "z", (9,))
    stream.close()  # type: ignore[attr-defined]
