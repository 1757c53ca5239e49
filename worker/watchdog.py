"""Ends a process in which no Python code runs any more.

A hang in the model's native code that holds the GIL stops every thread: none can detect it, leases lapse, and
the process would stay there forever. The timer of `faulthandler` needs no GIL: it prints every thread's stack
and exits with code 1, and the supervisor restarts the process.
"""

from __future__ import annotations

import faulthandler
import threading

MARGIN_S = 2.0
"""The worker itself detects a hang that leaves the GIL free, and reports more about it: it goes first."""


class Watchdog:
    """Once armed, the process exits when its threads have stood still for `limit_s` and a margin.

    Arm it after the model is loaded, as native code that loads and compiles may hold the GIL for long, and
    before the first job is pulled, as one that holds the GIL forever leaves no thread to arm it. A process
    that was stopped for as long (SIGSTOP, a frozen machine) exits when it is resumed: other workers have its
    jobs by then.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s + MARGIN_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-watchdog", daemon=True)

    def arm(self) -> None:
        """Start the timer; the limit counts from this call."""
        self._put_off()
        self._thread.start()

    def disarm(self) -> None:
        self._stop.set()
        if self._thread.ident is not None:
            self._thread.join()
        faulthandler.cancel_dump_traceback_later()

    def _run(self) -> None:
        while not self._stop.wait(self._limit_s / 8):
            self._put_off()

    def _put_off(self) -> None:
        faulthandler.dump_traceback_later(self._limit_s, exit=True)
