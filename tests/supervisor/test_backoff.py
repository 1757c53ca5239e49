"""Delays between restarts: they grow, differ, and end nowhere."""

from __future__ import annotations

import random

from pagemill.supervisor.backoff import FIRST_S, Backoff


def test_delays_double_up_to_the_longest() -> None:
    backoff = Backoff(max_s=8.0, chance=random.Random(1))
    delays = [backoff.fail() for _ in range(2000)]
    for number, delay in enumerate(delays):
        longest = min(8.0, FIRST_S * 2.0 ** min(number, 32))
        assert longest / 2 <= delay <= longest
    assert len({round(delay, 6) for delay in delays[10:20]}) == 10, "processes must not restart in step"


def test_a_reset_begins_again() -> None:
    backoff = Backoff()
    for _ in range(9):
        backoff.fail()
    backoff.reset()
    assert backoff.fail() <= FIRST_S


def test_later_failures_are_told_less_often() -> None:
    backoff = Backoff()
    loud = []
    for number in range(1, 1001):
        backoff.fail()
        loud += [number] if backoff.is_loud else []
    assert loud == [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512]
