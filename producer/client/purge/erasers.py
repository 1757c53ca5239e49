"""What else a queue keeps of a tenant, by parts of the code that know their own keys.

A part that keeps something under a tenant's name beyond its jobs adds itself to `ERASERS`. It is removed where that is
asked for; otherwise the proof passes over its keys, and the report says that they were kept.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import date

from pagemill.producer.client.effects import Flow
from pagemill.producer.wire.calls import purge
from pagemill.producer.wire.calls.metering import usage
from pagemill.producer.wire.server.scripts import Call


@dataclass(frozen=True, slots=True)
class Eraser:
    """A part of what is kept of tenants."""

    name: str
    """What the report calls it, and the option that asks for it."""
    kinds: frozenset[str]
    """The first words of its keys, behind the queue's prefix."""
    erase: Callable[[str, str], Flow[int]]
    """Removes what a queue has of a tenant; returns how much it was. May be run again."""


def _settings(queue: str, tenant: str) -> Flow[int]:
    call: Call[int] = purge.places(queue, tenant, [("settings", "")])
    removed: int = yield call
    return removed


def _ledger(queue: str, tenant: str) -> Flow[int]:
    """Remove the rows day by day, and at least what was spent: one script looks at a day's rows only."""
    removed = 0
    days: list[date] = yield usage.days(queue)
    for day in days or [date.min]:
        found: int = yield usage.erase(queue, tenant, day)
        removed += found
    return removed


ERASERS: tuple[Eraser, ...] = (
    Eraser("settings", frozenset({"weights", "quotas"}), _settings),
    Eraser("ledger", frozenset({"usage", "spent"}), _ledger),
)
