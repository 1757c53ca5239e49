"""The outboxes: ended jobs whose webhook, or whose relay, has yet to be told. The end writes the entry, atomically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.calls.reads import Outcome, read_outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call


@dataclass(frozen=True, slots=True)
class Notice:
    """One delivery to make. Nobody else is given it until the claim lapses."""

    url: str
    """The webhook's; a relay's name in a relay's box."""
    tries: int
    """This one included."""
    tenant: str
    finished_at: float
    outcome: Outcome


def claim(queue: str, limit: int, claim_ms: int, *, relay: str = "") -> Call[list[Notice]]:
    """Take up to `limit` deliveries that are due; they come again after `claim_ms` unless settled.

    Of the webhooks; or of the jobs that were submitted for this relay.
    """
    return Call("outbox_claim", (keys.prefix(queue),), (limit, claim_ms, relay), _notices)


def settle(queue: str, job_id: str, tries: int, again_ms: int | None, *, relay: str = "") -> Call[bool]:
    """Delivered or given up (None), or try again in `again_ms`. False: another worker has claimed it since."""
    args = (job_id, tries, -1 if again_ms is None else again_ms, relay)
    return Call("outbox_settle", (keys.prefix(queue),), args, bool)


def _notices(reply: list[list[Any]]) -> list[Notice]:
    return [
        Notice(
            url=url.decode(),
            tries=tries,
            tenant=keys.split_lane(lane.decode())[2],
            finished_at=int(finished_at) / 1000,
            outcome=read_outcome(record),
        )
        for url, tries, lane, finished_at, record in reply
    ]
