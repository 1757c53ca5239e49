"""Workers, wake-up keys and the queue's own settings, as transitions."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from urllib.parse import urlsplit

from pydantic import Field

from pagemill.producer.wire.calls.memory import NO_MEMORY_LIMIT, MemoryUse
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.needs import BASE
from pagemill.producer.wire.schema.outputs import WireModel
from pagemill.producer.wire.server.scripts import Call, as_map

WORKER_TTL_MS = 10_000


class Speed(WireModel):
    """The speed at which a worker finishes jobs."""

    rows: int
    """Number of sequences that run concurrently."""
    busy_rate: float
    """Tokens of cost, as stated at submission, that one row finishes per second while most rows are occupied."""
    free_rate: float
    """The same while most rows are free."""


class WorkerInfo(WireModel):
    """The state that a worker reports with every heartbeat."""

    id: str
    models: tuple[str, ...]
    state: str = "ready"
    """loading, ready, paused, draining, drained, quarantined or unhealthy."""
    url: str | None = None
    """The address of its /metrics."""
    host: str = ""
    pid: int = 0
    started_at: float = 0.0
    running: int = 0
    """Jobs that the worker holds."""
    adapters: tuple[str, ...] = ()
    """The adapters that jobs of its models can name."""
    max_model_len: int | None = None
    """Maximum tokens of a prompt and its output, once the model is loaded."""
    speed: Speed | None = None
    """None until it has finished a job."""
    fingerprints: Mapping[str, str] = Field(default_factory=dict)
    """The fingerprints of its results: without an adapter, under "", and with each of its adapters."""

    revision: str = ""
    """The revision of its model: a hub's commit, a digest, or the operator's name for it; empty while it loads."""

    knows: str = BASE
    """The words of lanes that it pulls from (`needs.known_words`)."""

    def lanes(self) -> list[str]:
        """Return the last parts of the lanes it pulls from (`keys.lane_model`)."""
        served = self.served()
        return [*served, *(f"{name}~{self.revision}" for name in served if self.revision)]

    def served(self) -> list[str]:
        """Return its models, and each of them with each of its adapters, as lanes name them."""
        return [
            keys.lane_model(model, adapter) for adapter in (None, *self.adapters) for model in self.models
        ]


def page_address(worker: WorkerInfo) -> str | None:
    """Return the address for a link to the worker's page; None if there is none.

    A worker that listens on all addresses is reached by its host's name; one that listens on loopback can
    only be reached on its own machine.
    """
    try:
        url = urlsplit(worker.url or "")
        port = url.port
    except ValueError:
        return None
    name = url.hostname
    if url.scheme not in ("http", "https") or not name:
        return None
    if name in ("0.0.0.0", "::") and worker.host:
        return f"{url.scheme}://{worker.host}:{port}/"
    is_local = name in ("localhost", "::1") or name.startswith("127.")
    return None if is_local and worker.host not in ("", socket.gethostname()) else worker.url


@dataclass(frozen=True, slots=True)
class QueueStats:
    """The statistics of a queue. `waiting` and `oldest_s` are keyed by (priority, tenant, model)."""

    counts: dict[str, int]
    """Jobs by state: current for the active states, all-time for the terminal ones."""
    waiting: dict[tuple[str, str, str], int]
    oldest_s: dict[tuple[str, str, str], float]
    leases: int
    dead: int
    """Jobs in the dead-letter set."""
    paused: bool
    followers: int = 0
    """Queued duplicates that wait for an equal job to end; they are in no waiting set."""
    memory: MemoryUse = NO_MEMORY_LIMIT
    lanes: Mapping[str, int] = field(default_factory=dict)
    """Waiting jobs by lane."""


@dataclass(frozen=True, slots=True)
class StatsPage:
    """The statistics of a queue, and some of its lanes: name to (jobs, age of the oldest in seconds)."""

    totals: QueueStats
    """The statistics without the lanes."""
    lanes: dict[str, tuple[int, float]]
    cursor: str
    """The cursor of the next page; "0" after the last."""


@dataclass(frozen=True, slots=True)
class RunningPage:
    """Some of the running jobs. `looked` is the number of jobs read; fewer than requested means the end."""

    looked: int
    job_ids: list[str]


def heartbeat(queue: str, info: WorkerInfo, ttl_ms: int = WORKER_TTL_MS) -> Call[None]:
    """Register the worker, or keep it registered. After `ttl_ms` without a heartbeat it counts as lost."""
    args: tuple[str | int, ...] = (info.id, ttl_ms, info.model_dump_json(), *info.lanes())
    return Call("heartbeat", (keys.prefix(queue),), args, _nothing)


def unregister(queue: str, worker_id: str) -> Call[None]:
    """Remove the worker. Any leases that it holds lapse."""
    return Call("leave", (keys.prefix(queue),), (worker_id,), _nothing)


def workers(queue: str) -> Call[list[WorkerInfo]]:
    """Return the live workers."""
    return Call(
        "workers",
        (keys.prefix(queue),),
        (),
        lambda reply: [WorkerInfo.model_validate_json(row) for row in reply],
    )


def served(queue: str) -> Call[list[str]]:
    """Return the models, and adapters as `<model>#<adapter>`, that workers served within about the last day."""
    return Call("served", (keys.prefix(queue),), (), lambda reply: [name.decode() for name in reply])


def set_paused(queue: str, paused: bool) -> Call[None]:
    """Pause or resume a queue. Paused: nothing is pulled, running jobs finish, new jobs are accepted."""
    return Call("pause", (keys.prefix(queue),), (int(paused),), _nothing)


def stats_page(queue: str, cursor: str = "0") -> Call[StatsPage]:
    """Return a queue's statistics and a page of its lanes. Does not need a live worker."""
    return Call("stats", (keys.prefix(queue),), (cursor,), _stats_page)


def stats(run: Callable[[Call[StatsPage]], StatsPage], queue: str) -> QueueStats:
    """Return the statistics with all lanes, read in pages of a thousand, so that no call takes long."""
    page = run(stats_page(queue))
    lanes = dict(page.lanes)
    while page.cursor != "0":
        page = run(stats_page(queue, page.cursor))
        lanes |= page.lanes
    waiting: dict[tuple[str, str, str], int] = {}
    oldest: dict[tuple[str, str, str], float] = {}
    for name, (jobs, age_s) in lanes.items():
        _, priority, tenant, model = keys.split_lane(name)
        lane = (priority, tenant, model)
        waiting[lane] = waiting.get(lane, 0) + jobs
        oldest[lane] = max(oldest.get(lane, 0.0), age_s)
    counts = {name: jobs for name, (jobs, _) in lanes.items()}
    return replace(page.totals, waiting=waiting, oldest_s=oldest, lanes=counts)


def running(queue: str, skip: int, limit: int, *, relay: str = "") -> Call[RunningPage]:
    """Return a page of the running jobs: all of them, or those that were submitted for `relay`."""
    return Call("running", (keys.prefix(queue),), (skip, limit, relay), _running_page)


def doorbells(queue: str, models: Sequence[str]) -> list[str]:
    """Return the keys that an idle worker blocks on: `BLPOP <doorbells> <timeout>`, then always `pull`."""
    return [keys.doorbell(queue, model) for model in models]


def _running_page(reply: list[Any]) -> RunningPage:
    looked, job_ids, *_ = reply
    return RunningPage(looked, [job_id.decode() for job_id in job_ids])


def _nothing(reply: Any) -> None:
    return None


def _stats_page(reply: list[Any]) -> StatsPage:
    found = as_map(reply)
    totals = QueueStats(
        counts={name: int(value) for name, value in as_map(found["counts"]).items()},
        waiting={},
        oldest_s={},
        leases=found["leases"],
        dead=found["dead"],
        paused=bool(found["paused"]),
        followers=found["followers"],
        memory=MemoryUse.parse(found["memory"]),
    )
    lanes = {name.decode(): (jobs, int(age_ms) / 1000) for name, jobs, age_ms in found["lanes"]}
    return StatsPage(totals, lanes, found["cursor"].decode())
