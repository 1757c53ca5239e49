"""Pauses between attempts."""

from __future__ import annotations

import random
import time

FIRST_S = 0.05
LOUD_FAILURES = 5
"""Failures in a row that are all logged; later ones are if their number is a power of two."""


class Backoff:
    """Pauses that double from `first_s` to `max_s`, until an optional timeout.

    Args:
        jitter: the fraction of a pause that is shortened at random, so that processes do not retry in step.
        timeout_s: no pause extends past this time from now; None: no limit.
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
        self._deadline = None if timeout_s is None else time.monotonic() + timeout_s
        self.failures = 0
        """Number of pauses since the last reset."""

    def next(self) -> float:
        """Return the seconds until the next attempt."""
        pause = min(self._max_s, self._first_s * 2.0 ** min(self.failures, 32))
        self.failures += 1
        if self._jitter:
            pause *= random.uniform(1.0 - self._jitter, 1.0)
        return pause if self.remaining is None else min(pause, self.remaining)

    def reset(self) -> None:
        """Start again with the first pause; the timeout stays."""
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
        """Whether the last failure is worth a line in the log."""
        return self.failures <= LOUD_FAILURES or self.failures.bit_count() == 1
