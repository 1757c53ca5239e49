"""How the time of steps is divided."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.worker.device_time import DeviceTime


def test_requests_share_the_steps_in_which_both_are_there() -> None:
    time = DeviceTime()
    time.add(5.0)  # belongs to no job
    time.begin("a")
    time.add(1.0)
    time.begin("b")
    time.add(1.0)
    assert time.end("a") == pytest.approx(1.5)
    time.add(1.0)
    assert time.end("b") == pytest.approx(1.5)
    assert time.end("b") == 0.0


@given(st.lists(st.tuples(st.integers(0, 4), st.floats(0.0, 1.0))))
def test_the_shares_sum_to_the_steps(events: list[tuple[int, float]]) -> None:
    time, held, spent, given_out = DeviceTime(), set[str](), 0.0, 0.0
    for number, seconds in events:
        name = str(number)
        if name in held:
            held.remove(name)
            given_out += time.end(name)
        else:
            held.add(name)
            time.begin(name)
        time.add(seconds)
        spent += seconds if held else 0.0
    assert given_out + sum(map(time.end, held)) == pytest.approx(spent)
