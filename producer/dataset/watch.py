"""Reports why a run waits: Redis does not answer, or no live worker serves a model of its jobs."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TypeAlias

from pagemill.producer.client import flows
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.schema.job import Job

LOOK_S = 5.0
"""Seconds between two reads of the registry of workers."""
REPEAT_S = 300.0

Notify: TypeAlias = Callable[[str, bool], None]
"""Receives a message, and whether the run cannot continue without help."""


class RunWatch:
    """Tracks the jobs in flight, and compares their models with those of the live workers. Not thread-safe."""

    def __init__(self, producer: Producer, notify: Notify) -> None:
        self._producer = producer
        self._notify = notify
        self._models: dict[str, str] = {}
        """Maps the key of a job in flight to its model."""
        self._missing: dict[str, float] = {}
        """Maps a model without a live worker to the time of its next report."""
        self._lost_at: float | None = None
        self._is_full = False
        self._look_at = time.monotonic() + LOOK_S

    def sent(self, jobs: Iterable[Job]) -> None:
        self._models.update((job.key or "", job.model) for job in jobs)

    def ended(self, key: str) -> None:
        self._models.pop(key, None)

    def forget(self) -> None:
        """Drop all jobs, since the server has lost them."""
        self._models.clear()

    def lost(self, error: Exception, patience_s: float) -> None:
        """Report, once per outage, that a call failed and that the run waits."""
        if self._lost_at is None:
            self._lost_at = time.monotonic()
            self._notify(f"lost Redis, waiting up to {patience_s:.0f} s for it: {error}", False)

    def full(self, error: Exception) -> None:
        """Report, once until jobs are accepted again, that the queue accepts no more."""
        if not self._is_full:
            self._is_full = True
            self._notify(f"the queue is full, waiting for room: {error}", False)

    def accepted(self) -> None:
        self._is_full = False
        self.answered()

    def answered(self) -> None:
        if self._lost_at is not None:
            away_s, self._lost_at = time.monotonic() - self._lost_at, None
            self._notify(f"Redis answers again after {away_s:.0f} s; the run continues", False)
            self._look_at = time.monotonic() + LOOK_S  # workers register again

    def check(self) -> None:
        """Report the models in flight that no live worker serves, unless they were reported a moment ago.

        Raises RedisUnavailable.
        """
        now = time.monotonic()
        if now < self._look_at:
            return
        self._look_at = now + LOOK_S
        queue = self._producer.queue
        alive = self._producer.run_flow(flows.call(registry.workers(queue)))
        served = {name for worker in alive for name in worker.models}
        waiting = Counter(self._models.values())
        for model in [model for model in self._missing if model not in waiting or model in served]:
            del self._missing[model]
            if model in served:
                self._notify(f"a live worker of queue {queue} serves {model} again", False)
        loading = sum(worker.state == "loading" for worker in alive)
        for model in sorted(waiting.keys() - served):
            if now >= self._missing.get(model, 0.0):
                self._missing[model] = now + REPEAT_S
                jobs = "1 job waits" if waiting[model] == 1 else f"{waiting[model]:,} jobs wait"
                others = f"; {loading} still load their models" if loading else ""
                self._notify(f"no live worker of queue {queue} serves {model}; {jobs} for one{others}", True)
