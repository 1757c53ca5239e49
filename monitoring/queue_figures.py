"""The queue as somebody with a Redis connection saw it. Plain Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Lane = tuple[str, Priority]
"""(model, priority)."""
WorkerStage = Literal["loading", "ready", "draining", "unwell"]
STAGES: tuple[WorkerStage, ...] = get_args(WorkerStage)
Ended = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
ENDED: tuple[Ended, ...] = get_args(Ended)

MAX_MODELS = 100
"""Anybody may submit a job for a model of any name; more than this are exported as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """What the Redis server says about itself. None: it does not tell (managed servers hide some of it)."""

    memory_used_bytes: int | None = None
    memory_max_bytes: int | None = None
    """0: without a limit."""
    evicted_keys: int | None = None
    """Anything above 0 means lost jobs: the policy must be noeviction."""
    aof_enabled: bool | None = None
    aof_delayed_fsyncs: int | None = None
    connected_clients: int | None = None
    blocked_clients: int | None = None
    connected_replicas: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """One queue at one moment. What is missing from a mapping counts as 0."""

    queue: str
    taken_at: float
    """Unix seconds."""
    waiting: Mapping[Lane, int] = field(default_factory=dict)
    """Jobs ready to be pulled."""
    oldest_age_seconds: Mapping[Lane, float] = field(default_factory=dict)
    """Age of the longest waiting job since its submit."""
    delayed: int = 0
    """Jobs that wait for their time, retries included."""
    running: int = 0
    """Jobs that some worker has pulled."""
    leases: int = 0
    """Leases, lapsed ones that nobody has swept yet included."""
    dead: int = 0
    """Jobs in the dead-letter set."""
    paused: bool = False
    submitted: int = 0
    """Jobs that the queue has taken, ever."""
    ended: Mapping[Ended, int] = field(default_factory=dict)
    """Jobs that have ended, ever, by how."""
    workers: Mapping[WorkerStage, int] = field(default_factory=dict)
    """Live workers by what they say they do."""
    serving: Mapping[str, int] = field(default_factory=dict)
    """Model -> ready workers that serve it."""
    server: ServerFigures | None = None
    drain_seconds: float | None = None
    """How long what is queued takes at the present rate of ends; None when nobody can say."""

    def with_drain(self, seconds: float | None) -> QueueFigures:
        return replace(self, drain_seconds=seconds)

    @property
    def models(self) -> tuple[str, ...]:
        """Models that are served or waited for, the served ones and the longest lanes first; not too many."""
        jobs: dict[str, int] = {}
        for (model, _), waiting in self.waiting.items():
            jobs[model] = jobs.get(model, 0) + waiting
        names = {*jobs, *self.serving}
        by_rank = sorted(names, key=lambda name: (not self.serving.get(name), -jobs.get(name, 0), name))
        return tuple(by_rank[:MAX_MODELS])


class DrainEstimate:
    """How long the jobs that are queued will take, from the ends of the last minutes.

    Fed with every reading of the queue, however far apart; the estimate needs two that lie apart far enough.
    """

    def __init__(self, window_s: float = 300.0, least_s: float = 1.0) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._ends: deque[tuple[float, int]] = deque()

    def update(self, figures: QueueFigures) -> float | None:
        """Seconds until queued and running jobs have ended; None when nothing ends, or too little is known."""
        backlog = sum(figures.waiting.values()) + figures.delayed + figures.running
        ended = sum(figures.ended.values())
        if self._ends and ended < self._ends[-1][1]:
            self._ends.clear()  # another server, or one that was flushed
        self._ends.append((figures.taken_at, ended))
        # The oldest reading kept is the last one outside the window, so that sparse scrapes have one too.
        while len(self._ends) > 2 and self._ends[1][0] <= figures.taken_at - self._window_s:
            self._ends.popleft()
        if not backlog:
            return 0.0
        began, before = self._ends[0]
        elapsed = figures.taken_at - began
        if elapsed < self._least_s or ended <= before:
            return None
        return backlog * elapsed / (ended - before)
