"""The queue's metrics, read from Redis. Plain Python."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Literal, get_args

Priority = Literal["high", "normal", "low"]
PRIORITIES: tuple[Priority, ...] = get_args(Priority)
Lane = tuple[str, Priority]
"""(model, priority)."""
WorkerStage = Literal["loading", "ready", "paused", "draining", "drained", "quarantined", "unhealthy"]
STAGES: tuple[WorkerStage, ...] = get_args(WorkerStage)
Ended = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
ENDED: tuple[Ended, ...] = get_args(Ended)

TokenKind = Literal["prompt", "cached", "completion"]
TOKEN_KINDS: tuple[TokenKind, ...] = get_args(TokenKind)
"""`cached` ones are among those of the prompt."""

MAX_MODELS = 100
"""Clients can submit jobs for any model name; models beyond this number are exported as `other`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """The Redis server's metrics. None: not reported (managed servers hide some)."""

    memory_used_bytes: int | None = None
    memory_max_bytes: int | None = None
    """0: no limit."""
    evicted_keys: int | None = None
    """Anything above 0 means lost jobs: the policy must be noeviction."""
    aof_enabled: bool | None = None
    aof_delayed_fsyncs: int | None = None
    connected_clients: int | None = None
    blocked_clients: int | None = None
    connected_replicas: int | None = None


Side = Literal["stable", "canary"]
RolloutState = Literal["open", "halted", "back", "ended"]
ROLLOUT_STATES: tuple[RolloutState, ...] = get_args(RolloutState)


@dataclass(frozen=True, slots=True, kw_only=True)
class SideFigures:
    """One side of a rollout since its start."""

    workers: int
    executions: int
    failures: int
    run_seconds: Mapping[str, float]
    """By quantile, of the latest executions; empty if there were none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutFigures:
    """The rollout of a model. Operators start rollouts, so there are few."""

    model: str
    state: RolloutState
    share: float
    agreement: float | None
    """The share of compared jobs with equal outputs; None: no jobs were compared."""
    sides: Mapping[Side, SideFigures]
    is_failing: bool
    """True if it was halted because the canary failed more often than the stable side."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UsageFigures:
    """Usage of jobs that ended today (UTC), over all tenants, from the ledger."""

    tokens: Mapping[TokenKind, int]
    device_seconds: float
    tenants_over_quota: int
    """Tenants whose jobs wait for a quota."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryFigures:
    """The queue's view of its server's memory."""

    limit_bytes: int = 0
    """Memory up to which jobs are accepted; 0: the server does not have a limit."""
    refused: int = 0
    """Jobs and files rejected because memory ran out, since the queue was created."""
    kinds: Mapping[str, float] = field(default_factory=dict)
    """Estimated bytes by kind of data; empty if the server does not report them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class QueueFigures:
    """One queue at one moment. Keys missing from a mapping count as 0."""

    queue: str
    taken_at: float
    """Unix seconds."""
    waiting: Mapping[Lane, int] = field(default_factory=dict)
    """Jobs ready to be pulled."""
    oldest_age_seconds: Mapping[Lane, float] = field(default_factory=dict)
    """Age of the longest waiting job since its submission."""
    delayed: int = 0
    """Jobs not yet due, including retries."""
    running: int = 0
    """Jobs held by a worker."""
    leases: int = 0
    """Leases, including lapsed ones not yet swept."""
    dead: int = 0
    """Jobs in the dead-letter set."""
    paused: bool = False
    submitted: int = 0
    """All jobs ever accepted by the queue."""
    ended: Mapping[Ended, int] = field(default_factory=dict)
    """All jobs ever ended, by outcome."""
    workers: Mapping[WorkerStage, int] = field(default_factory=dict)
    """Live workers by their reported stage."""
    serving: Mapping[str, int] = field(default_factory=dict)
    """Ready workers by served model."""
    usage: UsageFigures | None = None
    """None: not read."""
    rollouts: tuple[RolloutFigures, ...] = ()
    server: ServerFigures | None = None
    memory: MemoryFigures = field(default_factory=MemoryFigures)
    drain_seconds: float | None = None
    """Estimated time to finish the queued jobs at the present rate; None if unknown."""

    def with_drain(self, seconds: float | None) -> QueueFigures:
        return replace(self, drain_seconds=seconds)

    @property
    def models(self) -> tuple[str, ...]:
        """Return up to `MAX_MODELS` models, served or waited for: the served ones and longest lanes first."""
        jobs: dict[str, int] = {}
        for (model, _), waiting in self.waiting.items():
            jobs[model] = jobs.get(model, 0) + waiting
        names = {*jobs, *self.serving}
        by_rank = sorted(names, key=lambda name: (not self.serving.get(name), -jobs.get(name, 0), name))
        return tuple(by_rank[:MAX_MODELS])


class DrainEstimate:
    """Estimates the time to finish the queued jobs, from the completions of the last minutes.

    It receives every reading of the queue, at any interval; an estimate needs two readings separated by
    enough time.
    """

    def __init__(self, window_s: float = 300.0, least_s: float = 1.0) -> None:
        self._window_s = window_s
        self._least_s = least_s
        self._ends: deque[tuple[float, int]] = deque()

    def update(self, figures: QueueFigures) -> float | None:
        """Return seconds until all queued and running jobs have ended; None if no job ends or too few readings."""
        backlog = sum(figures.waiting.values()) + figures.delayed + figures.running
        ended = sum(figures.ended.values())
        if self._ends and ended < self._ends[-1][1]:
            self._ends.clear()  # another server, or a flushed one
        self._ends.append((figures.taken_at, ended))
        # Keep the last reading outside the window, so that sparse scrapes also have a pair.
        while len(self._ends) > 2 and self._ends[1][0] <= figures.taken_at - self._window_s:
            self._ends.popleft()
        if not backlog:
            return 0.0
        began, before = self._ends[0]
        elapsed = figures.taken_at - began
        if elapsed < self._least_s or ended <= before:
            return None
        return backlog * elapsed / (ended - before)
