"""Removal of all of a tenant's data from a queue, and the search for remains, as calls. Every step is bounded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map

LOOK_KEYS = 200
BATCH_JOBS = 32
LIST_ITEMS = 500
READ_BYTES = 256 << 10

Owner = Literal["ours", "theirs", "orphan", "other"]
Place = Literal["key", "lane", "started", "turn", "parked", "settings"]


@dataclass(frozen=True, slots=True)
class Key:
    """A key of the queue, its name without the queue's prefix.

    `owner`: `ours`, it belongs to a job or a batch of the tenant; `theirs`, to another tenant's; `orphan`, to a job
    without a record; `other`: determined by its name or content. `values` are described in purge_look.lua.
    """

    name: str
    owner: Owner
    values: tuple[str, ...] = ()

    @property
    def kind(self) -> str:
        return self.name.partition(":")[0]

    @property
    def rest(self) -> str:
        """The name after its kind."""
        return self.name.partition(":")[2]


@dataclass(frozen=True, slots=True)
class KeyPage:
    cursor: str
    """Where to continue; "0" at the end."""
    keys: list[Key]


@dataclass(frozen=True, slots=True)
class Removed:
    """The outcome of one removing step, in job ids."""

    gone: list[str]
    running: list[str]
    """Jobs asked to end that still exist."""
    left: list[str]
    """Jobs left for the next step."""
    looked: int = 0


@dataclass(frozen=True, slots=True)
class BatchOwners:
    recorded: str
    """The tenant of all its jobs, "*" for several, "" if an earlier release submitted them."""
    looked: int
    tenants: list[str]


@dataclass(frozen=True, slots=True)
class Content:
    """A part of a key's contents, and where to continue, "" at the end."""

    place: str
    items: list[bytes]


def fence(queue: str, tenant: str, ms: int) -> Call[int]:
    """Reject new data of the tenant for `ms`, or accept it again with 0."""
    return Call("purge_fence", (keys.prefix(queue),), (tenant, ms), int)


def scan(queue: str, cursor: str, tenant: str, *, others: bool = False) -> Call[KeyPage]:
    """Return a part of the keyspace; `others`: including data of other tenants' jobs that may name the tenant's."""
    return Call("purge_look", (keys.prefix(queue),), (cursor, LOOK_KEYS, tenant, int(others)), _page)


def read(queue: str, name: str, place: str = "") -> Call[Content]:
    """Return a part of a key's contents, of any type, without scores."""
    return Call("purge_read", (keys.prefix(queue),), (name, place, LIST_ITEMS, READ_BYTES), _content)


def jobs(queue: str, tenant: str, job_ids: Sequence[str], *, by_force: bool) -> Call[Removed]:
    """Remove jobs. Running ones are asked to end, or with `by_force` removed and their workers fenced."""
    args: tuple[str | int, ...] = (tenant, int(by_force), *job_ids)
    return Call("purge_jobs", (keys.prefix(queue),), args, _removed)


def batch_owners(queue: str, batch_id: str, start: int) -> Call[BatchOwners]:
    """Return the tenants of the jobs in a part of a batch."""
    return Call("purge_owners", (keys.prefix(queue),), (batch_id, start, LIST_ITEMS), _owners)


def batch_jobs(
    queue: str, tenant: str, batch_id: str, start: int, *, whole: bool, by_force: bool
) -> Call[Removed]:
    """Remove the tenant's jobs from a part of a batch; `whole`: all of it is the tenant's."""
    args = (tenant, int(by_force), batch_id, start, BATCH_JOBS, int(whole))
    return Call("purge_batch", (keys.prefix(queue),), args, _removed)


def batch_feed(queue: str, batch_id: str, start: int) -> Call[int]:
    """Empty the places of removed jobs in a part of a batch's ends; returns the number read."""
    return Call("purge_feed", (keys.prefix(queue),), (batch_id, start, LIST_ITEMS), int)


def drop_batch(queue: str, batch_id: str) -> Call[bool]:
    """Delete a batch; False: some of its jobs have not ended."""
    return Call("purge_drop", (keys.prefix(queue),), (batch_id,), bool)


def files(queue: str, tenant: str) -> Call[tuple[list[str], str]]:
    """Remove some of the tenant's batches of the HTTP interface and one file; returns their ids."""
    return Call(
        "purge_files", (keys.prefix(queue),), (tenant,), lambda reply: (_decode(reply[0]), reply[1].decode())
    )


def places(queue: str, tenant: str, named: Sequence[tuple[Place, str]]) -> Call[int]:
    """Remove keys, empty lanes, places in the turns, and settings; returns the number removed."""
    args: tuple[str, ...] = (tenant,)
    for place, name in named:
        args += (place, name)
    return Call("purge_places", (keys.prefix(queue),), args, int)


def _page(reply: list[Any]) -> KeyPage:
    cursor, rows, *_ = reply
    return KeyPage(cursor.decode(), [_key(row) for row in rows])


def _key(row: list[bytes]) -> Key:
    name, owner, *values = (part.decode(errors="replace") for part in row)
    return Key(name, owner, tuple(values))  # type: ignore[arg-type]  # the script's words


def _removed(reply: list[Any]) -> Removed:
    found = as_map(reply)
    gone, running, left = (_decode(found[name]) for name in ("gone", "running", "left"))
    return Removed(gone, running, left, found.get("looked", 0))


def _content(reply: list[Any]) -> Content:
    return Content(reply[0].decode(), reply[1])


def _owners(reply: list[Any]) -> BatchOwners:
    recorded, looked, tenants, *_ = reply
    return BatchOwners(recorded.decode(), looked, _decode(tenants))


def _decode(reply: list[bytes]) -> list[str]:
    return [word.decode() for word in reply]
