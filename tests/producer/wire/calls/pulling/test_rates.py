"""Buckets of API keys: several are charged together, all or none."""

from __future__ import annotations

import time

import pytest

from pagemill.producer.wire.calls.gateway.rates import Rate, RateReply, take
from tests.producer.driving import Queue

SLOW = Rate(0.01, 10)


def taken(queue: Queue, count: int = 1, *, rate: Rate = SLOW, returned: int = 0) -> RateReply:
    return queue.run(take(queue.name, "key", rate, count, returned=returned))


def test_all_or_none_are_taken(queue: Queue) -> None:
    assert (taken(queue, 7).allowed, taken(queue, 4).allowed) == (True, False)
    refused = taken(queue, 4)
    assert (refused.allowed, refused.remaining) == (False, 3)
    assert refused.wait_s == pytest.approx(100, abs=5), "one is missing, and comes in 100 s"
    assert taken(queue, 10).wait_s == pytest.approx(700, abs=5)
    assert (taken(queue, 3).allowed, taken(queue).allowed) == (True, False)


def test_what_was_taken_before_is_put_back_first(queue: Queue) -> None:
    assert taken(queue).allowed
    assert taken(queue, 10, returned=1).allowed, "it held them all"
    refused = taken(queue, 2, returned=1)
    assert (refused.allowed, refused.remaining) == (False, 1)
    assert refused.wait_s == pytest.approx(100, abs=5)
    assert taken(queue).allowed, "the one that was put back"


def test_no_more_comes_back_than_it_holds(queue: Queue) -> None:
    assert not taken(queue, 11, returned=1_000_000).allowed
    assert taken(queue, 10).allowed
    assert not taken(queue).allowed


def test_after_the_wait_there_are_so_many(queue: Queue) -> None:
    rate = Rate(20, 10)
    assert taken(queue, 10, rate=rate).allowed
    wait_s = taken(queue, 4, rate=rate).wait_s
    assert 0 < wait_s <= 0.2
    time.sleep(wait_s + 0.01)
    assert taken(queue, 4, rate=rate).allowed


def test_the_bucket_is_forgotten_when_it_is_full(queue: Queue) -> None:
    taken(queue, 10)
    assert 0 < queue.client.pttl(f"{queue.prefix}rate:key") <= 1_001_000
    taken(queue, 1, rate=Rate(1e-9, 1_000_000))
    assert 0 < queue.client.pttl(f"{queue.prefix}rate:key") <= 10**10
