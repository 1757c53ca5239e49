"""How fast the worker ends jobs: what it announces, so that a submit can say when its job will end."""

from __future__ import annotations

import threading

from pagemill.producer.wire.calls.registry import Speed

FULL = 0.75
"""The share of rows that are taken when a rate counts as one with all rows taken."""
MEMORY = 0.97
"""The weight of what was before, at each job's end: half of it is forgotten after 23 jobs."""


class SpeedMeter:
    """Rates of a row, in tokens of cost (as jobs are submitted with) per second, over the latest jobs.

    With more rows taken each is slower, so jobs that ended with most rows taken are measured apart. Safe from any
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._busy = [0.0, 0.0]
        self._free = [0.0, 0.0]

    def ended(self, cost: int, row_seconds: float, share: float) -> None:
        """Count a job: its time on the worker times its rows, and the share of the worker's rows that were taken."""
        with self._lock:
            sums = self._busy if share >= FULL else self._free
            sums[:] = (sums[0] * MEMORY + cost, sums[1] * MEMORY + max(row_seconds, 1e-4))

    def speed(self, rows: int) -> Speed | None:
        """Return None until a job has ended. A rate that was not measured yet is taken to be the other."""
        with self._lock:
            busy, free = (cost / seconds if seconds else None for cost, seconds in (self._busy, self._free))
        if busy is None and free is None:
            return None
        return Speed(rows=rows, busy_rate=busy or free or 0.0, free_rate=free or busy or 0.0)
