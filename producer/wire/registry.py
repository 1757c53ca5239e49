"""Workers, doorbells and the queue's own switches, as transitions."""

from __future__ import annotations

from collections.abc import Sequence

from producer.wire import keys
from producer.wire.outputs import WireModel
from producer.wire.scripts import Call

WORKER_TTL_MS = 10_000


class WorkerInfo(WireModel):
    """What a worker says about itself with every heartbeat."""

    id: str
    models: tuple[str, ...]
    state: str = "ready"
    """loading, ready, draining or unwell."""
    url: str | None = None
    """Where its /metrics are."""
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    running: int = 0
    """Jobs it holds."""


def heartbeat(queue: str, info: WorkerInfo, ttl_ms: int = WORKER_TTL_MS) -> Call[None]:
    """Register the worker, or say that it still lives. After `ttl_ms` without one it counts as gone."""
    raise NotImplementedError


def leave(queue: str, worker_id: str) -> Call[None]:
    """Take the worker off the list. Its leases, if any, lapse by themselves."""
    raise NotImplementedError


def workers(queue: str) -> Call[list[WorkerInfo]]:
    """The workers that live, by id."""
    raise NotImplementedError


def set_paused(queue: str, paused: bool) -> Call[None]:
    """Pause: nothing is pulled, running jobs finish, submits are accepted."""
    raise NotImplementedError


def doorbells(queue: str, models: Sequence[str]) -> list[str]:
    """What an idle worker blocks on: `BLPOP <doorbells> <timeout>`, then `pull`, whatever came of it."""
    return [keys.doorbell(queue, model) for model in models]
