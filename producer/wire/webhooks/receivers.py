"""Selection of webhook deliveries to start: a receiver that hangs or fails only delays its own.

A receiver is a host with its port; within it, each path is also counted separately, since one host often serves many
consumers. Concurrency grows by one with each success. After repeated failures in a row, the receiver is paused for a
while, and then tried with a single delivery.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pagemill.producer.wire.calls.outbox import Due
from pagemill.producer.wire.schema.webhook_url import WebhookUrl

AT_ONCE = 64
"""Maximum concurrent deliveries of one process."""
UNPROVEN_AT_ONCE = 48
"""Maximum of these to receivers that failed last or have not answered yet."""
RECEIVER_AT_ONCE = 8
HOST_FAILURES, PATH_FAILURES = 4, 2
"""Failures in a row after which a host, or one of its paths, is paused."""
LAST_PAUSE_S = 300.0
MAX_TRACKED = 1024
"""Maximum number of hosts and paths whose results are remembered."""
MAX_LISTED, MAX_LISTED_OF_HOST = 64, 256
"""Maximum deliveries of one receiver in the list of due ones; more are postponed, to make room for others."""


class Receiver(NamedTuple):
    """A receiver. `path` is empty if all paths of `host` count together."""

    host: str
    path: str = ""

    @classmethod
    def of_url(cls, url: str) -> Receiver:
        """Return the receiver of a URL. All URLs that are rejected count as one receiver."""
        try:
            parsed = WebhookUrl.parse(url)
        except ValueError:
            return cls("")
        return cls(f"{parsed.host}:{parsed.port}", parsed.path.partition("?")[0])


@dataclass(slots=True)
class _Record:
    """The results of a host or a path, and its deliveries in progress."""

    limit: int
    in_flight: int = 0
    failures: int = 0
    """Number of failures in a row."""
    has_succeeded: bool = False
    paused_until: float = 0.0
    mean_s: float = 0.1
    """Duration of a delivery, as a moving average."""

    @property
    def is_proven(self) -> bool:
        return self.has_succeeded and not self.failures


@dataclass(slots=True)
class Choice:
    """The decision on due deliveries."""

    start: list[Due] = field(default_factory=list)
    later_ms: dict[str, int] = field(default_factory=dict)
    """Milliseconds to postpone the others by, by job id. A delivery in neither stays due."""


class Receivers:
    """Chooses the deliveries that may start. Not thread-safe.

    Args:
        first_pause_s: Seconds of a receiver's first pause; doubled with each further failure.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        first_pause_s: float,
        *,
        receiver_of: Callable[[str], Receiver] = Receiver.of_url,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._first_pause_s = first_pause_s
        self._receiver_of = receiver_of
        self._clock = clock
        self._records: dict[Receiver, _Record] = {}
        self._started: dict[str, tuple[Receiver, float]] = {}
        """By job id: the receiver, and when its delivery started."""

    @property
    def in_flight(self) -> int:
        return len(self._started)

    @property
    def paused(self) -> int:
        """Number of paused receivers."""
        now = self._clock()
        return len({name.host for name, record in self._records.items() if record.paused_until > now})

    def choose(self, due: Iterable[Due]) -> Choice:
        """Choose from deliveries, the earliest first. Those to start count from now on: report each to `ended`."""
        choice, now = Choice(), self._clock()
        unproven = sum(not self._records_of(name)[0].is_proven for name, _ in self._started.values())
        listed: Counter[Receiver] = Counter()
        for each in due:
            if each.job_id in self._started:
                continue
            name = self._receiver_of(each.receiver)
            records = self._records_of(name)
            is_proven = records[0].is_proven
            paused_s = max(record.paused_until for record in records) - now
            if paused_s > 0:
                choice.later_ms[each.job_id] = 1 + round(1000 * paused_s)
            elif (
                all(record.in_flight < record.limit for record in records)
                and len(self._started) < AT_ONCE
                and (is_proven or unproven < UNPROVEN_AT_ONCE)
            ):
                choice.start.append(each)
                self._started[each.job_id] = name, now
                unproven += not is_proven
                for record in records:
                    record.in_flight += 1
            else:
                host = Receiver(name.host)
                listed.update({name, host})
                if listed[name] > MAX_LISTED or listed[host] > MAX_LISTED_OF_HOST:
                    wait_s = listed[host] * max(record.mean_s for record in records) / RECEIVER_AT_ONCE
                    choice.later_ms[each.job_id] = round(1000 * min(LAST_PAUSE_S, max(0.5, wait_s)))
        self._forget()
        return choice

    def ended(self, job_id: str, is_success: bool | None, pause_s: float = 0.0) -> None:
        """Report the end of a delivery.

        Args:
            is_success: None if the receiver was not called.
            pause_s: Seconds of the pause that the receiver requested.
        """
        name, began = self._started.pop(job_id)
        now = self._clock()
        for record, most in zip(self._records_of(name), (HOST_FAILURES, PATH_FAILURES), strict=False):
            record.in_flight -= 1
            if is_success is None:
                continue
            record.mean_s += (now - began - record.mean_s) / 8
            if is_success:
                record.limit = min(RECEIVER_AT_ONCE, record.limit + 1)
                record.failures, record.has_succeeded, record.paused_until = 0, True, 0.0
                continue
            record.failures += 1
            if record.failures >= most:
                record.limit = 1
                own_s = self._first_pause_s * 2.0 ** min(20, record.failures - most)
                record.paused_until = now + min(LAST_PAUSE_S, own_s)
        if is_success is False and pause_s > 0:
            record.paused_until = max(record.paused_until, now + min(LAST_PAUSE_S, pause_s))
        self._forget()

    def _forget(self) -> None:
        idle = [name for name, record in self._records.items() if not record.in_flight]
        for name in idle[: max(0, len(self._records) - MAX_TRACKED)]:
            del self._records[name]

    def _records_of(self, name: Receiver) -> Sequence[_Record]:
        """Return the record of the host, and that of the path if it is counted separately."""
        host = self._record(Receiver(name.host), 2)
        return [host, self._record(name, 1)] if name.path else [host]

    def _record(self, name: Receiver, limit: int) -> _Record:
        """Return the record, which becomes the most recently used."""
        record = self._records.pop(name, None)
        if record is None:
            record = _Record(limit)
        self._records[name] = record
        return record
