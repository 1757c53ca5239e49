"""The server's clock is set back by an hour. docs/reliability.md lists every stored time that is then in the future."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest

from pagemill.producer.wire.calls import limits, outbox, registry
from pagemill.producer.wire.calls.gateway import api_batches, rates, stored_files
from pagemill.producer.wire.calls.gateway.stored_files import StoredFile
from tests.producer.driving import Queue, open_queue
from tests.server_clock import ClockedServer, clocked_server

HOUR = 3600


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ClockedServer]:
    with clocked_server(tmp_path_factory.mktemp("clock")) as server:
        yield server


@pytest.fixture
def queue(server: ClockedServer, queue_name: str) -> Iterator[Queue]:
    """Its clock runs an hour ahead, until the test sets it back."""
    server.set(HOUR)
    with open_queue(server.url, queue_name) as queue:
        yield queue


def soon(look: Callable[[], object], seconds: float = 30.0) -> bool:
    """Return True if the condition becomes true within a time that is short compared with the hour."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if look():
            return True
        time.sleep(0.2)
    return False


def test_a_rate_limited_queue_goes_on(server: ClockedServer, queue: Queue) -> None:
    queue.run(limits.set_limits(queue.name, limits.QueueLimits(rate=5.0)))
    queue.submit(*(f"j{i}" for i in range(20)))
    assert queue.pull(10)
    server.set(0)
    assert soon(lambda: queue.pull(10))


def test_the_rate_of_an_api_key_goes_on(server: ClockedServer, queue: Queue) -> None:
    def take() -> bool:
        return queue.run(rates.take(queue.name, "key", rates.Rate(5.0, 1))).allowed

    assert take()
    server.set(0)
    assert soon(take)


@pytest.mark.slow
def test_lapsed_leases_are_taken_over(server: ClockedServer, queue: Queue) -> None:
    queue.submit("a")
    queue.pull_one(lease_ms=6000)
    server.set(0)
    assert soon(lambda: queue.pull(1))


@pytest.mark.slow
def test_a_retry_does_not_wait_for_the_clock(server: ClockedServer, queue: Queue) -> None:
    queue.submit("a")
    queue.retry(queue.pull_one(), 1.0)
    server.set(0)
    assert soon(lambda: queue.pull(1))


def test_a_retry_can_be_cancelled_and_leaves_nothing(server: ClockedServer, queue: Queue) -> None:
    queue.submit("a")
    queue.retry(queue.pull_one(), 1.0)
    server.set(0)
    queue.sweep()
    assert queue.cancel("a") == "cancelled"
    assert not {"delayed", "retrying"} & queue.names()


def test_a_webhook_that_failed_is_tried_again(server: ClockedServer, queue: Queue) -> None:
    def claim() -> list[outbox.Notice]:
        return queue.run(outbox.claim(queue.name, 1, 1000))

    queue.submit("a", webhook="https://example.com/x")
    queue.commit(queue.pull_one())
    (notice,) = claim()
    queue.run(outbox.finish_delivery(queue.name, "a", notice.tries, 1_800_000))
    server.set(-2 * HOUR)
    assert soon(claim)


def test_workers_that_died_before_are_not_alive_until_then(server: ClockedServer, queue: Queue) -> None:
    info = registry.WorkerInfo(id="gone", models=("m",))
    queue.run(registry.heartbeat(queue.name, info))
    queue.submit("a")
    assert queue.status("a").error is None
    server.set(0)
    queue.sweep()
    assert queue.run(registry.workers(queue.name)) == []
    queue.run(registry.heartbeat(queue.name, registry.WorkerInfo(id="other", models=("m",))))
    assert queue.client.zrange(f"{queue.prefix}serves:m", 0, -1) == [b"other"]


@pytest.mark.slow
def test_a_batch_of_a_gateway_that_died_is_taken_over(server: ClockedServer, queue: Queue) -> None:
    file = StoredFile("file-1", 0.0, 3, 1, "in.jsonl", "batch", 0)
    queue.run(stored_files.begin(queue.name, "t", file, max_files=9, max_bytes=999))
    queue.run(stored_files.write(queue.name, "t", file.id, 0, b"abc"))
    queue.run(stored_files.finish(queue.name, "t", file.id, 864000.0))
    create = api_batches.create(queue.name, "batch_1", "t", file.id, "{}", window_s=86400.0, max_open=9)
    assert queue.run(create) == "created"
    assert queue.run(api_batches.claim(queue.name, 10_000)) is not None
    server.set(0)
    assert soon(lambda: queue.run(api_batches.claim(queue.name, 10_000)))


def test_low_priority_is_not_starved_by_jobs_of_before(server: ClockedServer, queue: Queue) -> None:
    """A job's age is unknown if its submit is in the future: it counts as one that has waited long."""
    queue.submit("low", priority="low")
    server.set(0)
    queue.submit(*(f"h{i}" for i in range(20)), priority="high")
    assert "low" in [job.job_id for job in queue.pull(8)]


def test_a_suspect_is_not_kept_waiting_by_a_reservation(server: ClockedServer, queue: Queue) -> None:
    queue.submit("suspect")
    for _ in range(3):
        job = queue.pull_one()
        queue.checkpoint(job)
        queue.lapse("suspect")
        queue.sweep()
    queue.client.hset(f"{queue.prefix}job:suspect", "at", 1)
    assert queue.pull(1, worker="gone", holding=1) == [], "it reserved itself, to run empty"
    server.set(0)
    assert queue.pull(1, worker="busy", holding=1) == []
    assert queue.client.hget(f"{queue.prefix}meta", "reserved_by") == b"busy"


def test_times_that_the_caller_gave_come_later_and_do_come(server: ClockedServer, queue: Queue) -> None:
    queue.submit("late", ttl=5.0)
    queue.submit("delayed", delay=5.0)
    server.set(0)
    queue.sweep()
    assert (queue.state("late"), queue.state("delayed")) == ("queued", "delayed")
    server.set(HOUR + 6)
    queue.sweep()
    assert (queue.state("late"), queue.state("delayed")) == ("expired", "queued")
