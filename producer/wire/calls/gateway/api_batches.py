"""Batches of the HTTP interface, as calls: opened by any gateway, run by the one that holds the lease.

A batch is a file's requests, submitted as a batch of the queue under the same id. The record here adds what
the queue does not know: the files, the status that clients see, and the lease holder.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map

LEASE_MS = 10_000
_DAY_MS = 86_400_000
RETENTION_MS = 35 * _DAY_MS
"""Time that a batch's record is kept."""

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"
]
CreateReply = Literal["created", "no_file", "full"]


@dataclass(frozen=True, slots=True)
class ApiBatch:
    """A batch's record: its saved `values` by name."""

    id: str
    values: dict[str, str]

    @property
    def status(self) -> str:
        return self.values["status"]


@dataclass(frozen=True, slots=True)
class Claim:
    """A batch held for the length of a lease."""

    batch: ApiBatch
    token: int


def create(
    queue: str, batch_id: str, tenant: str, file_id: str, doc: str, *, window_s: float, max_open: int
) -> Call[CreateReply]:
    """Open a batch over a file; the file is kept as long as the batch may run."""
    needed_ms = int(1000 * window_s) + _DAY_MS
    args = (batch_id, tenant, file_id, doc, RETENTION_MS, needed_ms, max_open)
    return Call("api_batch_create", (keys.prefix(queue),), args, lambda reply: reply.decode())


def claim(queue: str, lease_ms: int = LEASE_MS) -> Call[Claim | None]:
    """Claim an open batch that has no holder."""
    return Call("api_batch_claim", (keys.prefix(queue),), (lease_ms,), _claim)


def save(queue: str, held: Claim, values: dict[str, Any], lease_ms: int = LEASE_MS) -> Call[str | None]:
    """Write values and renew the lease. Returns the status, None if the claim is no longer valid.

    A batch that is being cancelled keeps that status. A lease of 0 releases the batch to others.
    """
    return _save(queue, held, values, lease_ms)


def end(queue: str, held: Claim, values: dict[str, Any]) -> Call[str | None]:
    """Write the last values, including the final status."""
    return _save(queue, held, values, -1)


def _save(queue: str, held: Claim, values: dict[str, Any], lease_ms: int) -> Call[str | None]:
    pairs = (part for pair in values.items() for part in pair)
    args = (held.batch.id, held.token, lease_ms, *pairs)
    return Call("api_batch_save", (keys.prefix(queue),), args, lambda reply: reply.decode() or None)


def find(queue: str, tenant: str, batch_id: str) -> Call[ApiBatch | None]:
    """Return the tenant's batch with that id."""
    args = (tenant, batch_id, "", 1)
    return Call(
        "api_batch_list", (keys.prefix(queue),), args, lambda reply: _batch(*reply[0]) if reply else None
    )


def find_all(queue: str, tenant: str, after: str, limit: int) -> Call[list[ApiBatch]]:
    """Return the tenant's batches, newest first, starting after the id `after` ("": from the first)."""
    args = (tenant, "", after, limit)
    return Call("api_batch_list", (keys.prefix(queue),), args, lambda reply: [_batch(*row) for row in reply])


def cancel(queue: str, tenant: str, batch_id: str) -> Call[ApiBatch | None]:
    """Request that a batch's holder cancels it. A batch that is writing its files, or has ended, is not changed."""
    return Call(
        "api_batch_cancel",
        (keys.prefix(queue),),
        (tenant, batch_id),
        lambda reply: _batch(batch_id.encode(), reply) if reply else None,
    )


def _claim(reply: list[Any]) -> Claim | None:
    if not reply:
        return None
    batch_id, token, flat, *_ = reply
    return Claim(_batch(batch_id, flat), int(token))


def _batch(batch_id: bytes, flat: list[bytes], *_: Any) -> ApiBatch:
    return ApiBatch(batch_id.decode(), {name: value.decode() for name, value in as_map(flat).items()})
