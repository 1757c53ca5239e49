"""The last executions that ended on this worker, for whoever looks at it. Plain Python; no prompt, no output."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

KEPT = 60


@dataclass(frozen=True, slots=True)
class JobEnd:
    """How one execution ended here."""

    job_id: str
    outcome: str
    """A terminal state, or retried, released, fenced, lost, error."""
    tokens: int
    """Output tokens, resumed ones included."""
    took_s: float
    """From the pull."""
    code: str = ""
    message: str = ""


class JobEnds:
    """A bounded list, newest first, safe from any thread."""

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._ends: deque[tuple[int, float, JobEnd]] = deque(maxlen=kept)
        self._number = 0

    def add(self, end: JobEnd) -> None:
        with self._lock:
            self._number += 1
            self._ends.appendleft((self._number, time.monotonic(), end))

    def read(self) -> list[tuple[int, float, JobEnd]]:
        """(number, age in seconds, end): the number tells ends of one job apart."""
        now = time.monotonic()
        with self._lock:
            return [(number, now - added_at, end) for number, added_at, end in self._ends]
