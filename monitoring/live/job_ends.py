"""The last executions that ended on this worker, for the live views. Plain Python; no prompt, no output."""

from __future__ import annotations

import threading
import time
from collections import deque
from dataclasses import dataclass

KEPT = 24
GOOD = frozenset({"succeeded", "cancelled", "released"})


@dataclass(frozen=True, slots=True)
class JobEnd:
    """The end of one execution on this worker."""

    job_id: str
    outcome: str
    """A terminal state, or retried, released, fenced, lost, error."""
    tokens: int
    """Output tokens, including resumed ones."""
    took_s: float
    """Seconds since the pull."""
    code: str = ""
    message: str = ""


@dataclass(frozen=True, slots=True)
class DatedEnd:
    number: int
    """Distinguishes several executions of one job."""
    ago_s: float
    end: JobEnd


class JobEnds:
    """The last completions and, separately, the last failures: a hundred successes per second must not displace these.

    Both are bounded, newest first, and safe to use from any thread.
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
