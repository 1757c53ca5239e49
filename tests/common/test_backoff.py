"""Pauses between attempts: they double, differ, and end with the timeout."""

from __future__ import annotations

import math

from pagemill.common.backoff import Backoff


def test_pauses_double_up_to_the_longest() -> None:
    backoff, exact = Backoff(0.5, 8.0), Backoff(0.5, 8.0, jitter=0.0)
    pauses = [backoff.next() for _ in range(2000)]
    for number, pause in enumerate(pauses):
        longest = min(8.0, 0.5 * 2.0 ** min(number, 32))
        assert longest / 2 <= pause <= longest
        assert exact.next() == longest
    assert len({round(pause, 6) for pause in pauses[10:20]}) == 10, "processes must not retry in step"


def test_a_reset_starts_again() -> None:
    backoff = Backoff(0.5)
    for _ in range(9):
        backoff.next()
    backoff.reset()
    assert backoff.next() <= 0.5


def test_no_pause_extends_past_the_timeout() -> None:
    backoff = Backoff(0.5, timeout_s=0.1)
    assert not backoff.is_over
    assert 0.0 < backoff.next() <= 0.1
    over = Backoff(timeout_s=0.0)
    assert over.is_over
    assert over.next() == 0.0
    assert Backoff(timeout_s=math.inf).remaining is None, (
        "no thread can wait for longer than the platform allows"
    )


def test_later_failures_are_logged_less_often() -> None:
    backoff = Backoff()
    loud = []
    for number in range(1, 1001):
        backoff.next()
        loud += [number] if backoff.is_loud else []
    assert loud == [1, 2, 3, 4, 5, 8, 16, 32, 64, 128, 256, 512]
