"""The last executions that ended on this worker, for whoever looks at it. Plain Python; no prompt, no output."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

KEPT = 24
GOOD = frozenset({"succeeded", "cancelled", "released"})


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


@dataclass(frozen=True, slots=True)
class DatedEnd:
    number: int
    """Tells several ends of one job apart."""
    ago_s: float
    end: JobEnd


class JobEnds:
    """The last ends, and the last that went wrong: a hundred good ones a second must not sweep those away.

    Both bounded, newest first, safe from any thread.
    """

    def __init__(self, kept: int = KEPT) -> None:
        self._lock = threading.Lock()
        self._ends: deque[tuple[int, float, JobEnd]] = deque(maxlen=kept)
        self._errors: deque[tuple[int, float, JobEnd]] = deque(maxlen=kept)
        self._number = 0

    def add(self, end: JobEnd) -> None:
        with self._lock:
            self._number += 1
            record = (self._number, time.monotonic(), end)
            self._ends.appendleft(record)
            if end.outcome not in GOOD:
                self._errors.appendleft(record)

    def ends(self) -> list[DatedEnd]:
        return self._read(self._ends)

    def errors(self) -> list[DatedEnd]:
        return self._read(self._errors)

    def _read(self, records: deque[tuple[int, float, JobEnd]]) -> list[DatedEnd]:
        now = time.monotonic()
        with self._lock:
            return [DatedEnd(number, now - added_at, end) for number, added_at, end in records]
