"""Lists of jobs as calls: each reads a bounded number of jobs and returns where to continue."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.calls.reads import unpack_progress
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import Progress, State, WireModel
from pagemill.producer.wire.server.scripts import Call

LOOK_JOBS = 500
"""Maximum number of jobs that one call reads; a walk through the keyspace reads this many keys."""


class JobLine(WireModel):
    """A job in a list. Times are unix seconds by the server's clock."""

    id: str
    state: State
    model: str
    tenant: str
    priority: str
    created_at: float
    started_at: float | None
    finished_at: float | None
    due_at: float | None
    worker: str | None
    attempt: int
    crashes: int
    batch: str | None
    key: str | None
    progress: Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFilter:
    """The properties of the jobs to list; '' for any."""

    state: str = ""
    tenant: str = ""
    model: str = ""
    key: str = ""
    """Its key inside its batch, or its idempotency key."""


@dataclass(frozen=True, slots=True)
class JobPage:
    """Some jobs. `place` is where to continue, '' at the end; `looked` is the number of jobs read."""

    place: str
    looked: int
    jobs: list[JobLine]


def listed(
    queue: str, source: str, place: str, wanted: JobFilter, *, look: int = LOOK_JOBS, most: int = LOOK_JOBS
) -> Call[JobPage]:
    """Return a page of a list: `running`, `delayed`, `dead`, `lane:<lane>`, `batch:<id>`, `key:<tenant>:<key>`, `all`.

    `all` finds every job with SCAN, in undefined order and possibly twice, and may return more than `most`.
    """
    args = (source, place, look, most, wanted.state, wanted.tenant, wanted.model, wanted.key)
    return Call("job_list", (keys.prefix(queue),), args, _page)


def jobs_page(queue: str, url: str = "", ttl_ms: int = 0) -> Call[str]:
    """Set the address of the jobs page, or with an empty `url` only read it; returns the address, '' for none."""
    return Call("jobs_page", (keys.prefix(queue),), (url, ttl_ms), lambda reply: reply.decode())


def _page(reply: list[Any]) -> JobPage:
    place, looked, rows, *_ = reply
    lines = []
    for row in rows:
        with suppress(
            ValueError, TypeError, LookupError
        ):  # a damaged record is left out; `status` reports it
            lines.append(_line(row))
    return JobPage(place.decode(), looked, lines)


def _line(row: list[bytes]) -> JobLine:
    job_id, *flat = (value.decode() for value in row)
    record = dict(zip(flat[::2], flat[1::2], strict=True))
    _, priority, tenant, model = keys.split_lane(record["lane"])
    return JobLine(
        id=job_id,
        state=record["state"],  # type: ignore[arg-type]  # checked by the model
        model=model,
        tenant=tenant,
        priority=priority,
        created_at=int(record["at"]) / 1000,
        started_at=_seconds(record.get("started_at")),
        finished_at=_seconds(record.get("finished_at")),
        due_at=_seconds(record.get("due_at")),
        worker=record.get("worker"),
        attempt=int(record.get("attempt", 0)),
        crashes=int(record.get("crashes", 0)),
        batch=record.get("batch"),
        key=record.get("key") or None,
        progress=unpack_progress(record.get("progress"), record.get("progress_at")),
    )


def _seconds(milliseconds: str | None) -> float | None:
    return int(milliseconds) / 1000 if milliseconds else None
