"""The registry of waits, shared by the two listeners. Independent of threads, event loops and the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from pagemill.common.backoff import FIRST_S, Backoff
from pagemill.producer.wire.schema import keys

IDLE_TICK_S = 0.25
"""Maximum sleep of a listener, so that a new wait is polled soon."""
POLL_CHUNK = 500
SWEEP_S = 1.0
"""Interval of sweeps while there are waits, so that deadlines pass even without a live worker."""
LEASE_PATIENCE_MS = 10_000
"""Lapsed leases are left to the workers for this long: after an outage all have lapsed, and are renewed first."""


@dataclass(slots=True, eq=False)
class Waiter:
    """One wait. `wake` is called from the listener: once, or for a lasting wait, at each event."""

    topic: str
    wake: Callable[[], None]
    polled: bool
    stays: bool
    pace: Backoff
    interval: float
    """The pace's latest pause."""
    next_poll: float


class WaitingRoom:
    """The waits of one Producer. Safe to use from several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiters: dict[str, list[Waiter]] = {}
        self._next_sweep = 0.0

    def __len__(self) -> int:
        return len(self._waiters)

    def enter(
        self, topic: str, wake: Callable[[], None], *, polled: bool = False, stays: bool = False
    ) -> Waiter:
        pace = Backoff(jitter=0.0)
        interval = pace.next()
        waiter = Waiter(topic, wake, polled, stays, pace, interval, time.monotonic() + interval)
        with self._lock:
            self._waiters.setdefault(topic, []).append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        with self._lock:
            waiters = self._waiters.get(waiter.topic)
            if waiters and waiter in waiters:
                waiters.remove(waiter)
                if not waiters:
                    del self._waiters[waiter.topic]

    def call(self, topics: Iterable[str]) -> None:
        """Wake the waiters for these topics."""
        with self._lock:
            woken = [waiter for topic in topics for waiter in self._take(topic)]
        for waiter in woken:
            waiter.wake()

    def _take(self, topic: str) -> list[Waiter]:
        waiters = self._waiters.pop(topic, [])
        if staying := [waiter for waiter in waiters if waiter.stays]:
            self._waiters[topic] = staying
        return waiters

    def call_all(self) -> None:
        """Wake all waiters: hints may have been missed."""
        with self._lock:
            topics = list(self._waiters)
        self.call(topics)

    def due(self) -> list[str]:
        """Return the jobs to poll now. A wait is polled less often as it gets older."""
        now = time.monotonic()
        due = []
        with self._lock:
            for topic, waiters in self._waiters.items():
                late = [waiter for waiter in waiters if waiter.polled and waiter.next_poll <= now]
                for waiter in late:
                    waiter.interval = waiter.pace.next()
                    waiter.next_poll = now + waiter.interval
                if late:
                    due.append(topic)
        return due

    def is_sweep_due(self) -> bool:
        """Return whether there are waits and a sweep of leases, due jobs and deadlines is due."""
        now = time.monotonic()
        if not self._waiters or now < self._next_sweep:
            return False
        self._next_sweep = now + SWEEP_S
        return True

    def tick(self) -> float:
        """Return the seconds that the listener may sleep; short while there is a recent wait."""
        with self._lock:
            young = any(
                waiter.polled and waiter.interval < IDLE_TICK_S
                for waiters in self._waiters.values()
                for waiter in waiters
            )
        return FIRST_S if young else IDLE_TICK_S


class Channels:
    """The channels with the hints of a queue, and the parser of their messages."""

    def __init__(self, queue: str) -> None:
        self._feeds = frozenset((keys.feed_channel(queue), keys.feeds_channel(queue)))
        self.names = (keys.ended_channel(queue), *sorted(self._feeds))

    def topics(self, message: Mapping[str, Any]) -> list[str]:
        """Return the topics of a hint, which is a message of the driver."""
        words: list[str] = message["data"].decode().split(" ")
        return [f"feed:{word}" for word in words] if message["channel"].decode() in self._feeds else words
