"""Reads of the ledger, one day at a time."""

from __future__ import annotations

from datetime import date

from pagemill.producer.client.effects import Flow
from pagemill.producer.wire.calls.metering.usage import UsageFilter, UsageRow, UsageSums, days, rows


def usage(queue: str, wanted: UsageFilter) -> Flow[list[UsageRow]]:
    """Return the usage of ended jobs, summed as requested. Raises InvalidJob for an unknown field."""
    sums = UsageSums(wanted)
    known: list[date] = yield days(queue)
    for day in filter(wanted.has, known):
        found: list[UsageRow] = yield rows(queue, day)
        sums.add(found)
    return list(sums.rows())
