"""What the parts of a worker share."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.monitoring.counters import WorkerCounters
from pagemill.producer.wire.schema.signing import Keys
from pagemill.worker.config import WorkerConfig
from pagemill.worker.job_queue import ServerClock
from pagemill.worker.jobs.job_table import JobTable
from pagemill.worker.jobs.journal import Journal


@dataclass(frozen=True, slots=True)
class WorkerContext:
    """One worker's settings, jobs and books. Each part has a connection of its own beside it."""

    config: WorkerConfig
    hmac_keys: Keys
    table: JobTable
    clock: ServerClock
    counters: WorkerCounters
    journal: Journal
