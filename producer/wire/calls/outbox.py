"""The outboxes: ended jobs with a webhook or relay to notify. An entry is written atomically with the end."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.calls.reads import Outcome, read_outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call


@dataclass(frozen=True, slots=True)
class Notice:
    """One delivery to make, exclusive to its claimant until the claim lapses."""

    url: str
    """The webhook's URL; in a relay's outbox the relay's name."""
    tries: int
    """Delivery attempts, this one included."""
    tenant: str
    finished_at: float
    outcome: Outcome


def claim(queue: str, limit: int, claim_ms: int, *, relay: str = "") -> Call[list[Notice]]:
    """Take up to `limit` deliveries that are due; they come again after `claim_ms` unless settled.

    Webhook deliveries, or those of jobs that were submitted for `relay`.
    """
    return Call("outbox_claim", (keys.prefix(queue),), (limit, claim_ms, relay), _notices)


def finish_delivery(
    queue: str, job_id: str, tries: int, again_ms: int | None, *, relay: str = ""
) -> Call[bool]:
    """Settle a delivery: over (None), or due again in `again_ms`. False: another worker has claimed it."""
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
