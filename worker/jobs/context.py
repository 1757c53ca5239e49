"""State shared by the parts of a worker."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.schema.signing import Keys
from pagemill.worker.config import WorkerConfig
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.ending import JobListeners
from pagemill.worker.jobs.job_table import JobTable
from pagemill.worker.jobs.speed import SpeedMeter


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's settings, jobs and counters. Each part also has its own connection."""

    config: WorkerConfig
    hmac_keys: Keys
    table: JobTable
    clock: ServerClock
    counters: WorkerCounters
    listeners: JobListeners
    speed: SpeedMeter
