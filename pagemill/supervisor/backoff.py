"""Delays between the restarts of a process that keeps ending."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

FIRST_S = 0.5
LOUD_FAILURES = 5
"""Failures in a row that are all logged; of later ones those whose number is a power of two are."""


@dataclass(slots=True)
class Backoff:
    """Doubles from `FIRST_S` to `max_s`, less up to half by chance, so that processes do not restart in step."""

    max_s: float = 60.0
    chance: random.Random = field(default_factory=random.Random)
    failures: int = 0
    """In a row."""

    def fail(self) -> float:
        """Count a failure; returns the seconds until the next attempt."""
        self.failures += 1
        longest = min(self.max_s, FIRST_S * 2.0 ** min(self.failures - 1, 32))
        return longest * self.chance.uniform(0.5, 1.0)

    def reset(self) -> None:
        self.failures = 0

    @property
    def is_loud(self) -> bool:
        """Whether the last failure is worth a line in the log."""
        return self.failures <= LOUD_FAILURES or self.failures.bit_count() == 1
