"""Ends a process in which no Python code runs any more.

A hang inside the model's native code that holds the interpreter lock stops every thread: nobody is left to see
it, leases lapse, and the process would sit there for ever. The timer that `faulthandler` keeps needs no lock: it
prints where every thread stands and exits with code 1, and the supervisor starts anew.
"""

from __future__ import annotations

import faulthandler
import threading

MARGIN_S = 2.0
"""A hang that leaves the lock alone is seen by the worker itself, which says more about it: it goes first."""


class Watchdog:
    """Once armed, the process exits when its threads have stood still for `limit_s` and a margin.

    Arm it when the model is loaded: native code that loads and compiles may hold the lock for long. And arm it before
    the first job is pulled: one that holds the lock for ever leaves nobody to do so afterwards. A process that
    was stopped (SIGSTOP, a frozen machine) for as long exits when it is resumed: other workers have its jobs by
    then.
    """

    def __init__(self, limit_s: float) -> None:
        self._limit_s = limit_s + MARGIN_S
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pagemill-watchdog", daemon=True)

    def arm(self) -> None:
        """The limit counts from this very call on."""
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
