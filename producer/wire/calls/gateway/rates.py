"""Rate limits, counted on the server across all gateways."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call


@dataclass(frozen=True, slots=True)
class Rate:
    """A token bucket that holds `burst` tokens and gains `per_second`."""

    per_second: float
    burst: int


@dataclass(frozen=True, slots=True)
class RateReply:
    allowed: bool
    remaining: int
    wait_s: float
    """Seconds until the requested count is available."""


def take(queue: str, name: str, rate: Rate, count: int = 1, *, returned: int = 0) -> Call[RateReply]:
    """Take `count` from the bucket `name`, or nothing, after returning `returned` of an earlier take.

    A count above the burst is never allowed.
    """
    args = (name, rate.per_second, rate.burst, count, returned)
    return Call("rate_take", (keys.prefix(queue),), args, _reply)


def _reply(reply: list[Any]) -> RateReply:
    taken, left, wait_ms, *_ = reply
    return RateReply(bool(taken), int(left), int(wait_ms) / 1000)
