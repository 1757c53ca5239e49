"""Erasers of further data of a tenant, each for the keys of one part of the code.

A part that stores data under a tenant's name beyond its jobs adds itself to `ERASERS`. The data is removed on request;
otherwise the proof skips its keys, and the report lists them as kept.
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
    """One part of the data of tenants."""

    name: str
    """Its name in the report, and in the option that requests it."""
    kinds: frozenset[str]
    """The first words of its keys, after the queue's prefix."""
    erase: Callable[[str, str], Flow[int]]
    """Removes a tenant's data from a queue; returns the amount. Can be repeated."""


def _settings(queue: str, tenant: str) -> Flow[int]:
    call: Call[int] = purge.places(queue, tenant, [("settings", "")])
    removed: int = yield call
    return removed


def _ledger(queue: str, tenant: str) -> Flow[int]:
    """Remove the rows day by day, and the spent quotas even without rows: one script only reads a day's rows."""
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
