"""Limits of a queue and weights of its tenants, as calls."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.server.scripts import Call, as_map

MAX_WEIGHT = 1000
MAX_LIMIT = 1e12
LEAST_MEMORY_SHARE = 0.1


@dataclass(frozen=True, slots=True)
class QueueLimits:
    """The limits of a queue; None: not set."""

    jobs: int | None = None
    """Jobs that may wait; unset, the producer's default (1,000,000) applies."""
    payload_bytes: int | None = None
    """Maximum bytes of one job, also if its payload is in a store. In Redis the maximum is 1 MiB."""
    rate: float | None = None
    """Jobs that may start per second, across all workers."""
    burst: int | None = None
    """Jobs that may start together after a pause."""
    memory_share: float | None = None
    """The share of the server's maxmemory up to which jobs are accepted; unset, 0.85."""


def limits(queue: str) -> Call[QueueLimits]:
    """Return the queue's current limits."""
    return Call("limits", (keys.prefix(queue),), (), _limits)


def set_limits(queue: str, wanted: QueueLimits) -> Call[QueueLimits]:
    """Set all limits of a queue; None removes one. Raises InvalidJob for an invalid limit.

    A rate without a burst allows the jobs of one second to start together, at least one.
    """
    burst = wanted.burst
    if burst is None and wanted.rate is not None:
        burst = default_burst(wanted.rate)
    values = {
        "limit": wanted.jobs,
        "max_payload": wanted.payload_bytes,
        "rate": wanted.rate,
        "burst": burst if wanted.rate is not None else None,
        "memory_share": wanted.memory_share,
    }
    for name, value in values.items():
        if value is not None and not 0 < value <= MAX_LIMIT:
            raise InvalidJob(f"a queue's {name} is above 0 and at most {MAX_LIMIT:.0e}")
    if wanted.memory_share is not None and not LEAST_MEMORY_SHARE <= wanted.memory_share <= 1:
        raise InvalidJob(f"a queue's memory_share is from {LEAST_MEMORY_SHARE} to 1")
    args = tuple(part for name, value in values.items() for part in (name, "" if value is None else value))
    return Call("limits", (keys.prefix(queue),), args, _limits)


def default_burst(rate: float) -> int:
    """Return the burst of a rate without one: the jobs of one second, at least one."""
    return max(1, round(rate))


def weights(queue: str) -> Call[dict[str, int]]:
    """Return the tenants' weights other than 1."""
    return Call("weights", (keys.prefix(queue),), (), _weights)


def set_weights(queue: str, wanted: Mapping[str, int]) -> Call[dict[str, int]]:
    """Set the weights of some tenants; the default is 1. Raises InvalidJob for an invalid weight."""
    for tenant, weight in wanted.items():
        keys.check_name(keys.TENANT_PATTERN, keys.TENANT_RULE, tenant)
        if not 1 <= weight <= MAX_WEIGHT:
            raise InvalidJob(f"a weight is a whole number from 1 to {MAX_WEIGHT}")
    args = tuple(part for pair in wanted.items() for part in pair)
    return Call("weights", (keys.prefix(queue),), args, _weights)


def _limits(reply: list[bytes]) -> QueueLimits:
    found = {name: float(value) for name, value in as_map(reply).items()}

    def integer(name: str) -> int | None:
        return int(found[name]) if name in found else None

    return QueueLimits(
        jobs=integer("limit"),
        payload_bytes=integer("max_payload"),
        rate=found.get("rate"),
        burst=integer("burst"),
        memory_share=found.get("memory_share"),
    )


def _weights(reply: Any) -> dict[str, int]:
    return {name: int(weight) for name, weight in as_map(reply).items()}
