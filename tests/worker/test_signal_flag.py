"""The flag that a worker's signal handlers set."""

from __future__ import annotations

import sys
import threading
from types import FrameType
from typing import Any

from pagemill.worker.signal_flag import SignalFlag


def is_set_at(flag: SignalFlag, place: int) -> bool:
    """Wait, and set the flag like a handler that interrupts the wait at this place; False: it has fewer places."""
    passed = 0

    def interrupt(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal passed
        frame.f_trace_opcodes = True
        if passed == place:
            flag.set()
        passed += 1
        return interrupt

    before = sys.gettrace()
    sys.settrace(interrupt)
    try:
        flag.wait(0.001)
    finally:
        sys.settrace(before)
    return passed > place


def test_a_handler_may_set_it_wherever_the_wait_is() -> None:
    place = 0
    while is_set_at(flag := SignalFlag(), place):
        assert flag.is_set()
        assert flag.wait(0)
        place += 1
    assert place > 10
    assert not flag.wait(0)


def test_who_waits_is_woken() -> None:
    flag = SignalFlag()
    timer = threading.Timer(0.01, flag.set)
    timer.start()
    assert flag.wait()
    timer.join()
