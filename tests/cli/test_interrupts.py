"""An interrupt is not lost in code where Python ignores exceptions."""

from __future__ import annotations

import os
import signal
import sys
import time
import weakref

import pytest

from pagemill.cli.terminal.interrupts import interrupts_kept


def interrupt() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(0)  # lets the handler run here


class Finalized:
    def __del__(self) -> None:
        interrupt()


class Plain:
    pass


def lose_an_interrupt(place: str) -> None:
    if place == "finalizer":
        Finalized()
    else:
        target = Plain()
        reference = weakref.ref(target, lambda _: interrupt())
        del target
        assert reference() is None
    time.sleep(60)


@pytest.mark.parametrize("place", ["finalizer", "callback"])
def test_an_interrupt_that_python_ignores_is_repeated(place: str) -> None:
    before = sys.unraisablehook
    with pytest.raises(KeyboardInterrupt), interrupts_kept():
        lose_an_interrupt(place)
    assert sys.unraisablehook is before


def test_other_ignored_errors_are_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda ignored: seen.append(ignored.exc_type))

    class Failing:
        def __del__(self) -> None:
            raise ValueError

    with interrupts_kept():
        Failing()
    assert seen == [ValueError]
