"""The outboxes: ended jobs with a webhook or relay to notify. An entry is written atomically with the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.calls.reads import Outcome, read_outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map


@dataclass(frozen=True, slots=True)
class Notice:
    """One delivery, exclusive to its claimant until the claim lapses."""

    url: str
    """The webhook's URL; in a relay's outbox the relay's name."""
    tries: int
    """Delivery attempts, including this one."""
    tenant: str
    finished_at: float
    outcome: Outcome


@dataclass(frozen=True, slots=True)
class Due:
    """A delivery that is due and not claimed."""

    job_id: str
    receiver: str
    """The webhook's URL; in a relay's outbox the job's tenant."""


@dataclass(frozen=True, slots=True)
class Pending:
    """An outbox and its earliest deliveries."""

    due: int
    """Number of due deliveries."""
    total: int
    """Including those scheduled for later, and claimed ones."""
    expired: int
    """Deliveries that this call removed: their job's record has expired."""
    first: list[Due]


def read_due(
    queue: str, limit: int, later_ms: Mapping[str, int] | None = None, *, relay: str = ""
) -> Call[Pending]:
    """Read up to `limit` deliveries that are due, without claiming them.

    Args:
        later_ms: Milliseconds to postpone deliveries of an earlier reading, by job id. This does not count as
            an attempt.
        relay: As in `claim`.
    """
    later = [part for job_id, ms in (later_ms or {}).items() for part in (job_id, ms)]
    return Call(
        "outbox_due", (keys.prefix(queue),), (limit, relay, *later), lambda reply: _pending(reply, relay)
    )


def claim(
    queue: str, limit: int, claim_ms: int, *, relay: str = "", job_ids: Sequence[str] = ()
) -> Call[list[Notice]]:
    """Claim up to `limit` due deliveries; they become due again after `claim_ms` unless settled.

    These are webhook deliveries, or those of jobs that were submitted for `relay`; with `job_ids` only these.
    """
    return Call("outbox_claim", (keys.prefix(queue),), (limit, claim_ms, relay, *job_ids), _notices)


def finish_delivery(
    queue: str, job_id: str, tries: int, again_ms: int | None, *, relay: str = "", outcome: str = ""
) -> Call[bool]:
    """Settle a delivery: finished (None), or due again in `again_ms`. False: another worker has claimed it.

    `outcome`: the result of a webhook's try, for the job's history, which keeps 300 bytes of it.
    """
    printable = "".join(char if char.isprintable() else "?" for char in outcome)
    text = printable.encode("ascii", "backslashreplace")
    args = (job_id, tries, -1 if again_ms is None else again_ms, relay, text)
    return Call("outbox_settle", (keys.prefix(queue),), args, bool)


def _pending(reply: list[Any], relay: str) -> Pending:
    found = as_map(reply)
    first = [
        Due(job_id.decode(), _tenant(receiver) if relay else receiver.decode(errors="replace"))
        for job_id, receiver, *_ in found["first"]
    ]
    return Pending(found["due"], found["total"], found["expired"], first)


def _notices(reply: list[list[Any]]) -> list[Notice]:
    return [
        Notice(
            url=found["receiver"].decode(errors="replace"),
            tries=found["tries"],
            tenant=_tenant(found["lane"]),
            finished_at=int(found["finished_at"]) / 1000 if found["finished_at"].isdigit() else 0.0,
            outcome=read_outcome(found["end"]),
        )
        for found in map(as_map, reply)
    ]


def _tenant(lane: bytes) -> str:
    """Return the tenant of a lane; empty for a damaged record, so that others are delivered."""
    try:
        return keys.split_lane(lane.decode())[2]
    except (ValueError, LookupError):
        return ""
