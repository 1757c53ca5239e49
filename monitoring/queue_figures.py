"""The queue as somebody with a Redis connection saw it. Plain Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """One queue at one moment. A priority that is missing from a mapping counts as 0."""

    queue: str
    taken_at: float
    """Unix seconds."""
    waiting: Mapping[Priority, int] = field(default_factory=dict)
    """Jobs ready to be pulled, by priority."""
    oldest_age_seconds: Mapping[Priority, float] = field(default_factory=dict)
    """Age of the longest waiting job since its submit, by priority."""
    delayed: int = 0
    """Jobs that wait for their time, retries included."""
    running: int = 0
    """Jobs that some worker has pulled."""
    leases: int = 0
    """Leases, lapsed ones that nobody has swept yet included."""
    dead: int = 0
    paused: bool = False
