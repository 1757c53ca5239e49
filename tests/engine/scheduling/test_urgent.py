"""Urgent requests take batch slots from the newest low ones, which do not lose tokens and always progress."""

from __future__ import annotations

import pytest

from pagemill.engine.scheduling.request import Request, SequenceStatus
from pagemill.engine.scheduling.running_batch import MIN_PROGRESS, NEARLY_DONE
from tests.engine.scheduling.harness import (
    PROMPT,
    Harness,
    expected,
    make_config,
    make_request,
    tokens_by_row,
)

HIGH, NORMAL, LOW = -1, 0, 1


def full(priority: int = LOW, *, max_tokens: int = 40, **changes: object) -> tuple[Harness, list[Request]]:
    """Four batch slots, all of them occupied."""
    harness = Harness(make_config(**({"max_num_seqs": 4} | changes)))
    requests = [
        harness.add(make_request(f"r{i}", [i, *PROMPT], priority=priority, arrival=i, max_tokens=max_tokens))
        for i in range(4)
    ]
    while harness.scheduler.num_running < 4:
        harness.step()
    return harness, requests


def running(requests: list[Request]) -> list[str]:
    return [r.request_id for r in requests if r.sequences[0].status is SequenceStatus.RUNNING]


@pytest.mark.parametrize("num_host_blocks", [0, 64])
def test_the_newest_low_request_gives_its_row_and_goes_on_afterwards(num_host_blocks: int) -> None:
    harness, low = full(num_host_blocks=num_host_blocks)
    high = harness.add(make_request("high", PROMPT, priority=HIGH, arrival=9.0, max_tokens=4))
    harness.step()
    assert running([*low, high]) == ["r0", "r1", "r2", "high"]
    assert harness.scheduler.stats().displaced == 1
    harness.run()
    for request in (*low, high):
        assert request.sequences[0].output_token_ids == expected(harness, request)[0]
    assert harness.scheduler.stats().displaced == 1


def test_its_prompt_comes_before_the_tokens_of_the_others() -> None:
    harness, _ = full(max_num_batched_tokens=8)
    harness.add(make_request("high", range(8), priority=HIGH, arrival=9.0, max_tokens=2))
    harness.step()
    assert list(tokens_by_row(harness.plans[-1]).values()) == [8]
    harness.run()


@pytest.mark.parametrize(
    ("running_as", "asking_as"), [(LOW, NORMAL), (NORMAL, HIGH), (HIGH, HIGH), (NORMAL, NORMAL)]
)
def test_only_high_takes_and_only_low_gives(running_as: int, asking_as: int) -> None:
    harness, requests = full(running_as)
    harness.add(make_request("asking", PROMPT, priority=asking_as, arrival=9.0))
    harness.step()
    assert len(running(requests)) == 4
    assert harness.scheduler.stats().displaced == 0
    harness.run()


def test_half_of_the_rows_stay_with_the_low_requests() -> None:
    harness, low = full()
    high = [
        harness.add(make_request(f"high{i}", [9, *PROMPT, i], priority=HIGH, arrival=9.0, max_tokens=30))
        for i in range(4)
    ]
    for _ in range(8):
        harness.step()
    assert running(low) == ["r0", "r1"]
    assert running(high) == ["high0", "high1"]
    harness.run()
    assert all(r.sequences[0].output_token_ids == expected(harness, r)[0] for r in (*low, *high))


def test_a_request_for_more_rows_than_it_may_take_displaces_none() -> None:
    harness, low = full()
    harness.add(make_request("wide", PROMPT, priority=HIGH, arrival=9.0, n=3, temperature=1.0))
    harness.step()
    assert len(running(low)) == 4
    assert harness.scheduler.stats().displaced == 0
    harness.run()


def test_a_row_that_is_nearly_done_is_waited_for() -> None:
    harness, low = full(max_tokens=NEARLY_DONE + 1)
    harness.add(make_request("high", PROMPT, priority=HIGH, arrival=9.0))
    harness.step()
    assert len(running(low)) == 4
    harness.run()
    assert harness.scheduler.stats().displaced == 0


def test_who_was_displaced_gets_on_before_it_is_displaced_again() -> None:
    harness, _ = full(max_tokens=100)
    known: list[int] = []
    for number in range(12):
        harness.add(
            make_request(f"high{number}", [number, *PROMPT], priority=HIGH, arrival=9.0, max_tokens=2)
        )
        before = harness.scheduler.stats().displaced
        for _ in range(6):
            harness.step()
        known.append(harness.scheduler.stats().displaced - before)
    assert set(known) <= {0, 1}
    assert sum(known) >= 4
    assert MIN_PROGRESS > 6, "else the steps between two of them are enough"
    harness.run()


@pytest.mark.parametrize(("caching", "length"), [(False, 60), (True, 80)], ids=["too large", "in the cache"])
def test_none_is_displaced_in_vain(caching: bool, length: int) -> None:
    """The blocks belong to a normal request, or are shared with it."""
    harness = Harness(make_config(max_num_seqs=8, num_kv_blocks=33, enable_prefix_caching=caching))
    harness.add(make_request("normal", range(80), priority=NORMAL, max_tokens=40))
    for number in range(4):
        harness.add(make_request(f"r{number}", [number, 5, 6], priority=LOW, arrival=1, max_tokens=40))
    for _ in range(4):
        harness.step()
    harness.add(make_request("high", range(length), priority=HIGH, arrival=9.0, max_tokens=4))
    harness.run()
    assert harness.scheduler.stats().displaced == 0


def test_blocks_are_taken_as_well_as_rows() -> None:
    harness, low = full(num_kv_blocks=17, enable_prefix_caching=False)  # 4 rows of 3 blocks leave 4
    high = harness.add(make_request("high", range(30), priority=HIGH, arrival=9.0, max_tokens=4))
    for _ in range(3):
        harness.step()
    assert running([high]) == ["high"]
    assert len(running(low)) >= 2
    harness.run()
    assert all(r.sequences[0].output_token_ids == expected(harness, r)[0] for r in (*low, high))
