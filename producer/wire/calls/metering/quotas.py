"""Quotas of tenants: tokens and jobs a minute and a day, as calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.server.scripts import Call

EVERYBODY = "*"
"""Stands for every tenant without quotas of its own."""
MAX_QUOTA = 10**12


@dataclass(frozen=True, slots=True)
class Quota:
    """What jobs of a tenant may take; None: as much as there is. The day is UTC."""

    tokens_per_minute: int | None = None
    jobs_per_minute: int | None = None
    tokens_per_day: int | None = None
    jobs_per_day: int | None = None

    @property
    def is_unlimited(self) -> bool:
        return self == Quota()


@dataclass(frozen=True, slots=True)
class Left:
    """What is left of one quota."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until all of it is left again, if no job starts."""


@dataclass(frozen=True, slots=True)
class QuotaLeft:
    """What a tenant has left of its quotas, jobs that wait not counted; None: no such quota."""

    tokens_per_minute: Left | None = None
    jobs_per_minute: Left | None = None
    tokens_per_day: Left | None = None
    jobs_per_day: Left | None = None

    @property
    def tokens(self) -> Left | None:
        """The quota of tokens that has less left."""
        return _scarcer(self.tokens_per_minute, self.tokens_per_day)

    @property
    def jobs(self) -> Left | None:
        """The quota of jobs that has less left."""
        return _scarcer(self.jobs_per_minute, self.jobs_per_day)


def quotas(queue: str) -> Call[dict[str, Quota]]:
    """Return the quotas by tenant."""
    return Call("quotas", (keys.prefix(queue),), (), _quotas)


def set_quotas(queue: str, wanted: Mapping[str, Quota]) -> Call[dict[str, Quota]]:
    """Set all quotas of some tenants; a `Quota()` takes them away. Returns everybody's. Raises InvalidJob."""
    for tenant, quota in wanted.items():
        if tenant != EVERYBODY and not keys.TENANT_PATTERN.fullmatch(tenant):
            raise InvalidJob(keys.TENANT_RULE)
        for limit in astuple(quota):
            if limit is not None and not 1 <= limit <= MAX_QUOTA:
                raise InvalidJob(f"a quota is a whole number from 1 to {MAX_QUOTA:.0e}")
    args = tuple(part for tenant, quota in wanted.items() for part in (tenant, _packed(quota)))
    return Call("quotas", (keys.prefix(queue),), args, _quotas)


def left(queue: str, tenants: Sequence[str]) -> Call[dict[str, QuotaLeft]]:
    """Return what tenants have left; those without quotas are not in it."""
    return Call("quota", (keys.prefix(queue),), tuple(tenants), read_lines)


def read_lines(lines: Sequence[bytes]) -> dict[str, QuotaLeft]:
    """Parse lines of a reply, each of a tenant."""
    return dict(_line(line.decode()) for line in lines)


def _line(line: str) -> tuple[str, QuotaLeft]:
    tenant, *parts = line.split()
    found = [
        None if limit == "-" else Left(int(limit), int(remaining), int(reset_ms) / 1000)
        for limit, remaining, reset_ms in zip(parts[::3], parts[1::3], parts[2::3], strict=True)
    ]
    return tenant, QuotaLeft(*found)


def _scarcer(*quotas: Left | None) -> Left | None:
    return min((each for each in quotas if each is not None), key=lambda each: each.remaining, default=None)


def _packed(quota: Quota) -> str:
    if quota.is_unlimited:
        return ""
    return " ".join("-" if limit is None else str(limit) for limit in astuple(quota))


def _quotas(reply: Any) -> dict[str, Quota]:
    flat = list(reply)
    return {
        tenant.decode(): Quota(*(None if part == b"-" else int(part) for part in packed.split()))
        for tenant, packed in zip(flat[::2], flat[1::2], strict=True)
    }
