"""The speed at which the worker finishes jobs. It is announced, so that submissions can get an estimate."""

from __future__ import annotations

import threading

from pagemill.producer.wire.calls.registry import Speed

FULL = 0.75
"""The share of occupied rows above which a rate counts as one with all rows occupied."""
MEMORY = 0.97
"""The weight of the previous value at each job's end: its influence halves after 23 jobs."""


class SpeedMeter:
    """Rates of a row, in tokens of cost (as jobs are submitted with) per second, over the latest jobs.

    With more occupied rows each is slower, so jobs that ended with most rows occupied are measured
    separately. Safe on any thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = [0.0, 0.0]
        self._free = [0.0, 0.0]

    def ended(self, cost: int, row_seconds: float, share: float) -> None:
        """Record a job: its time on the worker times its rows, and the share of the worker's rows occupied."""
        with self._lock:
            sums = self._busy if share >= FULL else self._free
            sums[:] = (sums[0] * MEMORY + cost, sums[1] * MEMORY + max(row_seconds, 1e-4))

    def speed(self, rows: int) -> Speed | None:
        """Return the speed; None until a job has ended. A rate that was not measured yet equals the other one."""
        with self._lock:
            busy, free = (cost / seconds if seconds else None for cost, seconds in (self._busy, self._free))
        if busy is None and free is None:
            return None
        return Speed(rows=rows, busy_rate=busy or free or 0.0, free_rate=free or busy or 0.0)
