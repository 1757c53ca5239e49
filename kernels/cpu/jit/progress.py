"""Progress of kernels that numba is compiling. A first startup takes minutes, and should not appear to hang."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from numba.core import event

_COMPILED = "numba:compile"  # not sent for code loaded from disk


class _Counter(event.Listener):
    def __init__(self, report: Callable[[int, float], None], every: float) -> None:
        self._report, self._every = report, every
        self._started = self._reported = time.monotonic()
        self._count = 0

    def on_start(self, event: event.Event) -> None:
        pass

    def on_end(self, event: event.Event) -> None:
        self._count += 1
        now = time.monotonic()
        if now >= self._reported + self._every:
            self._reported = now
            self._report(self._count, now - self._started)


@contextmanager
def report_compiling(report: Callable[[int, float], None], every: float = 2.0) -> Iterator[None]:
    """Inside the block, call `report(kernels compiled so far, seconds since)`, at most once per interval."""
    with event.install_listener(_COMPILED, _Counter(report, every)):
        yield
