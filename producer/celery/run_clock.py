"""The clock of Celery's tracer for tasks that ran elsewhere, so that their reported runtime is that of the work."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from celery import Celery
from celery.app.trace import build_tracer


class RunClock:
    """`time.monotonic`, but its first reading in `since(start)` is `start`; per thread.

    A tracer reads its clock when it begins and when the task's body has returned. Ours begins when the work is over.
    """

    def __init__(self) -> None:
        self._local = threading.local()

    def __call__(self) -> float:
        start: float | None = getattr(self._local, "start", None)
        self._local.start = None
        return time.monotonic() if start is None else start

    @contextmanager
    def since(self, start: float) -> Iterator[None]:
        """`start`: the reading of `time.monotonic` when the work began."""
        self._local.start = start
        try:
            yield
        finally:
            self._local.start = None


clock = RunClock()


def tracer(app: Celery, name: str, hostname: str | None = None) -> Any:
    """Return Celery's tracer of a task, by our clock."""
    return build_tracer(
        name, app.tasks[name], app.loader, hostname, app=app, propagate=False, monotonic=clock
    )
