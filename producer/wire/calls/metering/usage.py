"""The ledger: usage of ended jobs, by day, tenant, model and API key.

A job is counted once, in the script that ends it (`producer/wire/lua/features/ledger.lua`); docs/usage.md has the rule.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, fields
from datetime import date, timedelta
from functools import partial
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.server.scripts import Call

OTHERS = "*"
"""Tenant and model of the row for usage beyond a day's maximum number of rows."""
_EPOCH = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class JobUsage:
    """The usage of a job's last execution, as its worker reports it with the job's end."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Prompt tokens that came from the prefix cache."""
    completion_tokens: int = 0
    device_s: float = 0.0

    def packed(self) -> str:
        counts = (
            self.prompt_tokens,
            self.cached_tokens,
            self.completion_tokens,
            round(self.device_s * 1000),
        )
        return " ".join(map(str, counts))


@dataclass(frozen=True, slots=True)
class UsageRow:
    """The usage of the jobs that ended on a day; for sums over several rows, some names are empty."""

    day: str
    """UTC, by the server's clock, for example `2026-01-31`."""
    tenant: str
    model: str
    """`<model>#<adapter>` for a job with an adapter."""
    api_key: str
    """The name of the gateway's API key; empty for jobs from other sources."""
    jobs: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    device_s: float


@dataclass(frozen=True, slots=True)
class UsageTotals:
    """The usage of all jobs that ended today (UTC)."""

    jobs: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    device_s: float = 0.0
    tenants_over_quota: int = 0
    """Number of tenants whose jobs wait for a quota."""


COLUMNS = tuple(field.name for field in fields(UsageRow))
GROUPS = ("day", "tenant", "model", "api_key")


def days(queue: str) -> Call[list[date]]:
    """Return the days of the ledger, oldest first."""
    return Call("usage", (keys.prefix(queue),), (), _days)


def rows(queue: str, day: date) -> Call[list[UsageRow]]:
    """Return the rows of a day."""
    return Call("usage", (keys.prefix(queue),), ((day - _EPOCH).days,), partial(_rows, day))


def erase(queue: str, tenant: str, day: date) -> Call[int]:
    """Remove a tenant from a day, and its spent quotas; returns the number of rows."""
    keys.check_name(keys.TENANT_PATTERN, keys.TENANT_RULE, tenant)
    return Call("usage_erase", (keys.prefix(queue),), (tenant, (day - _EPOCH).days), int)


def totals(queue: str) -> Call[UsageTotals]:
    """Return the sums of today, for monitoring."""
    return Call("usage_totals", (keys.prefix(queue),), (), _totals)


@dataclass(frozen=True, slots=True)
class UsageFilter:
    """A selection of the ledger's rows, and the fields to sum them by."""

    since: date | None = None
    until: date | None = None
    """The last day, inclusive."""
    tenant: str | None = None
    model: str | None = None
    """Includes the model's adapters."""
    by: tuple[str, ...] = GROUPS
    """A subset of `GROUPS`; the other fields are empty."""

    def has(self, day: date) -> bool:
        return (self.since is None or day >= self.since) and (self.until is None or day <= self.until)

    def takes(self, row: UsageRow) -> bool:
        names = (row.model, row.model.partition("#")[0])
        return self.tenant in (None, row.tenant) and (self.model is None or self.model in names)


class UsageSums:
    """Rows summed by some of their fields."""

    def __init__(self, wanted: UsageFilter) -> None:
        """Raises InvalidJob for an unknown field."""
        for name in wanted.by:
            if name not in GROUPS:
                raise InvalidJob(f"usage is summed by {', '.join(GROUPS)}, not by {name}")
        self._wanted = wanted
        self._sums: dict[tuple[str, ...], list[float]] = {}

    def add(self, found: list[UsageRow]) -> None:
        for row in found:
            if self._wanted.takes(row):
                group = tuple(getattr(row, name) if name in self._wanted.by else "" for name in GROUPS)
                sums = self._sums.setdefault(group, [0, 0, 0, 0, 0])
                for place, name in enumerate(COLUMNS[len(GROUPS) :]):
                    sums[place] += getattr(row, name)

    def rows(self) -> Iterator[UsageRow]:
        """Yield the sums, ordered by their fields."""
        for group, sums in sorted(self._sums.items()):
            day, tenant, model, api_key = group
            jobs, prompt, cached, completion = map(int, sums[:4])
            device_s = round(sums[4], 3)
            yield UsageRow(day, tenant, model, api_key, jobs, prompt, cached, completion, device_s)


def _days(reply: list[bytes]) -> list[date]:
    return [_EPOCH + timedelta(days=int(day)) for day in reply]


def _rows(day: date, reply: list[bytes]) -> list[UsageRow]:
    found = []
    for name, value in zip(reply[::2], reply[1::2], strict=True):
        lane, _, api_key = name.decode().partition(" ")
        tenant, _, model = lane.partition(":")
        jobs, prompt, cached, completion, device_ms = map(int, value.split()[:5])
        counts = (jobs, prompt, cached, completion, device_ms / 1000)
        found.append(UsageRow(day.isoformat(), tenant, model, api_key, *counts))
    return found


def _totals(reply: list[Any]) -> UsageTotals:
    jobs, prompt, cached, completion, device_ms, parked = map(int, reply)
    return UsageTotals(jobs, prompt, cached, completion, device_ms / 1000, parked)
