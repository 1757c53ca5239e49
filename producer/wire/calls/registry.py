"""Workers, doorbells and the queue's own switches, as transitions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import WireModel
from pagemill.producer.wire.server.scripts import Call

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


@dataclass(frozen=True, slots=True)
class QueueStats:
    """A queue at a glance. `waiting` and `oldest_s` are by (priority, tenant, model)."""

    counts: dict[str, int]
    """Jobs by state: now for the active states, ever for the terminal ones."""
    waiting: dict[tuple[str, str, str], int]
    oldest_s: dict[tuple[str, str, str], float]
    leases: int
    dead: int
    """Jobs in the dead-letter set."""
    paused: bool
    followers: int = 0
    """Queued jobs that wait for the end of an equal one; they are in no waiting set."""


def heartbeat(queue: str, info: WorkerInfo, ttl_ms: int = WORKER_TTL_MS) -> Call[None]:
    """Register the worker, or say that it still lives. After `ttl_ms` without one it counts as gone."""
    args: tuple[str | int, ...] = (info.id, ttl_ms, info.model_dump_json(), *info.models)
    return Call("heartbeat", (keys.prefix(queue),), args, _nothing)


def leave(queue: str, worker_id: str) -> Call[None]:
    """Take the worker off the list. Its leases, if any, lapse by themselves."""
    return Call("leave", (keys.prefix(queue),), (worker_id,), _nothing)


def workers(queue: str) -> Call[list[WorkerInfo]]:
    """The workers that live."""
    return Call(
        "workers",
        (keys.prefix(queue),),
        (),
        lambda reply: [WorkerInfo.model_validate_json(row) for row in reply],
    )


def set_paused(queue: str, paused: bool) -> Call[None]:
    """Pause: nothing is pulled, running jobs finish, submits are accepted."""
    return Call("pause", (keys.prefix(queue),), (int(paused),), _nothing)


def stats(queue: str) -> Call[QueueStats]:
    """What waits, what runs, what ended. Needs no live worker."""
    return Call("stats", (keys.prefix(queue),), (), _stats)


def doorbells(queue: str, models: Sequence[str]) -> list[str]:
    """What an idle worker blocks on: `BLPOP <doorbells> <timeout>`, then `pull`, whatever came of it."""
    return [keys.doorbell(queue, model) for model in models]


def _nothing(reply: Any) -> None:
    return None


def _stats(reply: list[Any]) -> QueueStats:
    flat, lanes, leases, dead, paused, followers = reply
    waiting: dict[tuple[str, str, str], int] = {}
    oldest: dict[tuple[str, str, str], float] = {}
    for name, jobs, age_ms in lanes:
        _, priority, tenant, model = keys.split_lane(name.decode())
        lane = (priority, tenant, model)
        waiting[lane] = waiting.get(lane, 0) + jobs
        oldest[lane] = max(oldest.get(lane, 0.0), int(age_ms) / 1000)
    counts = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    return QueueStats(counts, waiting, oldest, leases, dead, bool(paused), followers)
