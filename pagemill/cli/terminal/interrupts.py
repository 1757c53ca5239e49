"""Interrupts that Python would ignore."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_REPEAT_S = 0.05


@contextmanager
def interrupts_kept() -> Iterator[None]:
    """Repeat an interrupt that arrived in a finalizer or a weakref's callback, where Python ignores exceptions."""
    before = sys.unraisablehook
    repeats: list[threading.Timer] = []

    def repeat(ignored: Any) -> None:
        if ignored.exc_type is not KeyboardInterrupt:
            before(ignored)
            return
        repeats.append(threading.Timer(_REPEAT_S, os.kill, (os.getpid(), signal.SIGINT)))
        repeats[-1].start()

    sys.unraisablehook = repeat
    try:
        yield
    finally:
        sys.unraisablehook = before
        for timer in repeats:
            timer.cancel()
