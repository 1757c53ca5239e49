"""Jobs that all begin differently: the search for shared prefixes stops, and restarts when it pays off."""

from __future__ import annotations

from tests.producer.driving import Queue
from tests.producer.queue_sets import check_indexes

LANE = "1:1:default:m"
VAIN = 64


def submit(queue: Queue, *begins: str) -> list[str]:
    """One job for each prefix; returns their ids."""
    ids = [f"{begin}.{place}" for place, begin in enumerate(begins)]
    for job_id, begin in zip(ids, begins, strict=True):
        queue.submit(job_id, prompt=begin * 300)
    return ids


def taken(queue: Queue, count: int) -> list[str]:
    return [job.job_id for job in queue.pull(count)]


def differing(first: int, count: int) -> list[str]:
    return [f"x{number:04}" for number in range(first, first + count)]


def indexed(queue: Queue) -> int:
    return queue.client.zcard(f"{queue.prefix}alike:{LANE}")


def test_the_index_is_left_alone_after_many_in_vain(queue: Queue) -> None:
    ids = submit(queue, *differing(0, VAIN + 1))
    assert taken(queue, VAIN + 1) == ids
    later = submit(queue, *differing(1000, 100), "a", *differing(2000, 100), "a")
    assert taken(queue, 100) == later[:100]
    assert indexed(queue) == 0
    assert taken(queue, 102) == later[100:], "the second is too far behind for the worker to know of it"


def test_jobs_that_are_near_are_still_taken_together(queue: Queue) -> None:
    submit(queue, *differing(0, VAIN + 1))
    queue.pull(VAIN + 1)
    submit(queue, "a", "b", "c", "a", "b", "a")
    assert [name[0] for name in taken(queue, 6)] == ["a", "a", "a", "b", "b", "c"]


def test_now_and_then_the_worker_looks_again(queue: Queue) -> None:
    queue.client.hset(f"{queue.prefix}puller:w1", mapping={"turn": 1, "cursor": 1, "vain": 2048})
    submit(queue, "a", *differing(0, 30), "a")
    assert [name[0] for name in taken(queue, 3)] == ["a", "a", "x"]
    assert indexed(queue) > 0
    assert queue.client.hget(f"{queue.prefix}puller:w1", "vain") == b"1"


def test_many_that_leave_together_leave_the_lane(queue: Queue) -> None:
    """Also if some share a prefix, and if the queue ends in the middle of a call."""
    ids = submit(queue, *(begin for begin in differing(0, 25) for _ in range(2)), "last")
    assert taken(queue, 20) == ids[:20]
    assert queue.client.zcard(f"{queue.prefix}wait:{LANE}") == 31
    assert taken(queue, 100) == ids[20:]
    assert not {f"wait:{LANE}", f"alike:{LANE}", "lanes"} & queue.names()


def test_no_job_enters_the_index_after_it_was_taken(queue: Queue) -> None:
    """The eighth is pulled because it has waited longest; the index is started for the ninth, in the same call."""
    ids = submit(queue, *"aaaaaaa", "b", "c", "d", "a")
    queue.client.hset(f"{queue.prefix}job:{ids[7]}", "at", 1)
    assert [name[0] for name in taken(queue, 9)] == [*"aaaaaaa", "b", "a"]
    assert indexed(queue) == 3
    check_indexes(queue, queue.names())
