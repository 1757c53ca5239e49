"""Pauses between attempts."""

from __future__ import annotations

import random
import threading
import time

FIRST_S = 0.05
LOUD_FAILURES = 5
"""Number of consecutive failures that are all logged; later ones are if their number is a power of two."""


def pause_after(failures: int, first_s: float, max_s: float, jitter: float) -> float:
    """Return the seconds until the next attempt: `first_s`, doubled by each failure before the last one.

    Args:
        failures: number of consecutive failures, at least 1.
        jitter: the fraction of the pause that is shortened at random, so that processes do not retry in step.
    """
    pause = min(max_s, first_s * 2.0 ** min(failures - 1, 32))
    return pause * random.uniform(1.0 - jitter, 1.0) if jitter else pause


class Backoff:
    """Pauses that double from `first_s` to `max_s`, until an optional timeout.

    Args:
        jitter: see `pause_after`.
        timeout_s: no pause extends past this time from now; None, or longer than a thread can wait: no limit.
    """

    def __init__(
        self,
        first_s: float = FIRST_S,
        max_s: float = 1.0,
        *,
        jitter: float = 0.5,
        timeout_s: float | None = None,
    ) -> None:
        self._first_s, self._max_s, self._jitter = first_s, max_s, jitter
        self._deadline = (
            None if timeout_s is None or timeout_s > threading.TIMEOUT_MAX else time.monotonic() + timeout_s
        )
        self.failures = 0
        """Number of pauses since the last reset."""

    def next(self) -> float:
        """Return the seconds until the next attempt."""
        self.failures += 1
        pause = pause_after(self.failures, self._first_s, self._max_s, self._jitter)
        return pause if self.remaining is None else min(pause, self.remaining)

    def reset(self) -> None:
        """Start again with the first pause; the timeout remains."""
        self.failures = 0

    @property
    def remaining(self) -> float | None:
        """Seconds until the timeout; None without one."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    @property
    def is_over(self) -> bool:
        return self.remaining == 0.0

    @property
    def is_loud(self) -> bool:
        """Whether the last failure should be logged."""
        return self.failures <= LOUD_FAILURES or self.failures.bit_count() == 1
