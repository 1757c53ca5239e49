"""Which worker takes a job that waited for another: the one whose cache has its beginning, if it comes soon."""

from __future__ import annotations

from typing import Any

from pagemill.producer.wire.calls import transitions
from tests.producer.driving import Queue


def test_a_worker_takes_first_what_waited_for_its_own_jobs(queue: Queue) -> None:
    for name in "abcdef":
        queue.submit(name, prompt="p" * 300 + name)
        queue.submit(f"of-{name}", prompt="p" * 300 + name + " and on", after=[name])
    for job in queue.pull(3, worker="w1") + queue.pull(3, worker="w2"):
        queue.commit(job)
    assert [job.job_id for job in queue.pull(2, worker="w2")] == ["of-d", "of-e"]
    assert [job.job_id for job in queue.pull(2, worker="w1")] == ["of-a", "of-b"]
    # Nobody waits for the worker that would be best.
    assert [job.job_id for job in queue.pull(3, worker="w2")] == ["of-f", "of-c"]
    assert queue.client.hget(f"{queue.prefix}warm", "w2") == queue.client.hget(f"{queue.prefix}warm", "w1")


def test_what_begins_otherwise_goes_to_anybody(queue: Queue) -> None:
    for name in "ab":
        queue.submit(name, prompt="p" * 300 + name)
        queue.submit(f"of-{name}", prompt="q" * 300 + name, after=[name])
    for job in queue.pull(1, worker="a") + queue.pull(1, worker="b"):
        queue.commit(job)
    assert [job.job_id for job in queue.pull(1, worker="b")] == ["of-a"]


def with_a_released_job(queue: Queue, **fields: Any) -> None:
    """A job whose parent ran at worker "home", and others that waited for none."""
    queue.submit("p", **fields)
    queue.submit("of-p", after=["p"], **fields)
    queue.commit(queue.pull_one(worker="home"))
    queue.submit(*(f"j{number}" for number in range(80)))


def test_another_worker_leaves_a_released_job_to_its_own(queue: Queue) -> None:
    with_a_released_job(queue)
    taken = [queue.pull_one(worker="other").job_id for _ in range(10)]
    assert taken == [f"j{number}" for number in range(10)]
    assert "of-p" in [queue.pull_one(worker="home").job_id for _ in range(2)]


def test_it_does_64_times_at_most(queue: Queue) -> None:
    with_a_released_job(queue)
    taken = [queue.pull_one(worker="other").job_id for _ in range(81)]
    # The lanes of the two versions take turns, and at its own the released job is passed over.
    assert 64 <= taken.index("of-p") <= 80


def test_nothing_less_urgent_is_taken_instead(queue: Queue) -> None:
    with_a_released_job(queue, priority="high")
    assert queue.pull_one(worker="other").job_id == "of-p"


def test_the_oldest_is_overtaken_64_times_at_most(queue: Queue) -> None:
    names = ["first", *(f"j{number}" for number in range(70))]
    for name in names:
        queue.submit(name)
        queue.submit(f"of-{name}", after=[name])
    for job in queue.pull(1, worker="other") + queue.pull(70, worker="w1"):
        queue.commit(job)
    for _ in range(3):
        queue.run(transitions.sweep(queue.name))
    taken = [job.job_id for _ in range(71) for job in queue.pull(1, worker="w1")]
    assert taken == [
        *(f"of-j{number}" for number in range(64)),
        "of-first",
        *(f"of-j{n}" for n in range(64, 70)),
    ]
