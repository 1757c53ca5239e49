"""Quotas of tenants: tokens and jobs per minute and per day, as calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, fields
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.server.scripts import Call, as_map

EVERYBODY = "*"
"""Represents every tenant without separate quotas."""
MAX_QUOTA = 10**12


@dataclass(frozen=True, slots=True)
class Quota:
    """The quotas of a tenant's jobs; None: unlimited. Days are in UTC.

    `running` is the number of concurrent jobs.
    """

    tokens_per_minute: int | None = None
    jobs_per_minute: int | None = None
    tokens_per_day: int | None = None
    jobs_per_day: int | None = None
    running: int | None = None

    @property
    def is_unlimited(self) -> bool:
        return self == Quota()


_NAMES = tuple(one.name for one in fields(Quota))
"""The quotas in the order of replies, to which a later release may append others."""


@dataclass(frozen=True, slots=True)
class Remaining:
    """The remainder of one quota."""

    limit: int
    remaining: int
    reset_s: float
    """Seconds until it is full again, if no job starts."""


@dataclass(frozen=True, slots=True)
class TenantQuotas:
    """A tenant's remaining quotas, without counting waiting jobs; None: no such quota."""

    tokens_per_minute: Remaining | None = None
    jobs_per_minute: Remaining | None = None
    tokens_per_day: Remaining | None = None
    jobs_per_day: Remaining | None = None
    running: Remaining | None = None

    @property
    def tokens(self) -> Remaining | None:
        """The token quota with the smaller remainder."""
        return _scarcer(self.tokens_per_minute, self.tokens_per_day)

    @property
    def jobs(self) -> Remaining | None:
        """The job quota with the smaller remainder."""
        return _scarcer(self.jobs_per_minute, self.jobs_per_day)

    def pause_s(self, tokens: int) -> float:
        """Return the seconds until a job of that many tokens may start, without counting waiting jobs; 0.0: now."""
        amounts = {
            "tokens_per_minute": tokens,
            "jobs_per_minute": 1,
            "tokens_per_day": tokens,
            "jobs_per_day": 1,
        }
        pauses = [0.0]
        for name, amount in amounts.items():
            quota: Remaining | None = getattr(self, name)
            # A job that costs more than the full quota waits until the quota is full.
            missing = 0 if quota is None else min(amount, quota.limit) - quota.remaining
            if quota is not None and missing > 0:
                pauses.append(60.0 * missing / quota.limit if name.endswith("minute") else quota.reset_s)
        return max(pauses)


def quotas(queue: str) -> Call[dict[str, Quota]]:
    """Return the quotas by tenant."""
    return Call("quotas", (keys.prefix(queue),), (), _quotas)


def set_quotas(queue: str, wanted: Mapping[str, Quota]) -> Call[dict[str, Quota]]:
    """Set all quotas of some tenants; `Quota()` removes them. Returns those of all tenants. Raises InvalidJob."""
    for tenant, quota in wanted.items():
        if tenant != EVERYBODY:
            keys.check_name(keys.TENANT_PATTERN, keys.TENANT_RULE, tenant)
        for limit in astuple(quota):
            if limit is not None and not 1 <= limit <= MAX_QUOTA:
                raise InvalidJob(f"a quota is a whole number from 1 to {MAX_QUOTA:.0e}")
    args = tuple(part for tenant, quota in wanted.items() for part in (tenant, _packed(quota)))
    return Call("quotas", (keys.prefix(queue),), args, _quotas)


def remaining(queue: str, tenants: Sequence[str]) -> Call[dict[str, TenantQuotas]]:
    """Return the remaining quotas of tenants, without tenants that have none."""
    return Call("quota", (keys.prefix(queue),), tuple(tenants), read_lines)


def read_lines(lines: Sequence[bytes]) -> dict[str, TenantQuotas]:
    """Parse the lines of a reply, one per tenant."""
    return dict(_line(line.decode()) for line in lines)


def _line(line: str) -> tuple[str, TenantQuotas]:
    tenant, *parts = line.split()
    found = {
        name: Remaining(int(limit), int(remaining), int(reset_ms) / 1000)
        for name, limit, remaining, reset_ms in zip(
            _NAMES, parts[::3], parts[1::3], parts[2::3], strict=False
        )
        if limit != "-"
    }
    return tenant, TenantQuotas(**found)


def _scarcer(*quotas: Remaining | None) -> Remaining | None:
    return min((each for each in quotas if each is not None), key=lambda each: each.remaining, default=None)


def _packed(quota: Quota) -> str:
    if quota.is_unlimited:
        return ""
    return " ".join("-" if limit is None else str(limit) for limit in astuple(quota))


def _unpacked(packed: bytes) -> Quota:
    limits = zip(_NAMES, packed.split(), strict=False)
    return Quota(**{name: int(limit) for name, limit in limits if limit != b"-"})


def _quotas(reply: Any) -> dict[str, Quota]:
    return {tenant: _unpacked(packed) for tenant, packed in as_map(reply).items()}
