"""Ends a process in which Python code no longer runs.

A hang in the model's native code that holds the GIL stops every thread: no thread can detect it, leases
lapse, and the process would hang forever. The timer of `faulthandler` needs no GIL: it prints every thread's
stack and exits with code 1, and the supervisor restarts the process.
"""

from __future__ import annotations

import faulthandler
import threading

MARGIN_S = 2.0
"""The worker detects hangs that leave the GIL free itself, earlier and with a better report."""


class Watchdog:
    """Once armed, the process exits when its threads have not run for `limit_s` and a margin.

    Arm it after the model is loaded, since native code that loads and compiles may hold the GIL for long, and before
    the first job is pulled, since no thread could arm it while that job holds the GIL. A process that was stopped for
    as long (SIGSTOP, a frozen machine) exits when it is resumed, since other workers have its jobs by then.
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
