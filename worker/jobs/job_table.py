"""The jobs this worker holds, shared by admission, the reporter and the lease keeper."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from pagemill.worker.engine_host.messages import AddRequest
from pagemill.worker.jobs.running_job import RunningJob


class JobTable:
    """Leases by job id, and running jobs by request id. Every method is atomic.

    A job is held from the moment it is pulled until Redis has accepted its end; it runs from the moment the
    engine receives it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._leases: dict[str, int] = {}
        self._running: dict[str, RunningJob] = {}

    def hold(self, job_id: str, token: int) -> None:
        with self._lock:
            self._leases[job_id] = token

    def release(self, job_id: str, token: int) -> bool:
        """Remove a job; False if it was not, or is no longer, held under `token`.

        It can be held under a newer token: this worker has pulled it again after its lease had lapsed.
        """
        with self._lock:
            self._running.pop(f"{job_id}#{token}", None)
            if self._leases.get(job_id) != token:
                return False
            del self._leases[job_id]
            return True

    def start(self, job: RunningJob, send: Callable[[AddRequest], None]) -> bool:
        """Add `job` and `send` its request to the engine atomically, so that an abort can only come after.

        Returns False without sending if its lease was lost meanwhile.
        """
        with self._lock:
            if self._leases.get(job.job_id) != job.token:
                return False
            send(job.request)
            if job.request.media:  # the engine has their arrays now
                job.request = replace(job.request, media=())
            self._running[job.request_id] = job
            return True

    def by_request(self, request_id: str) -> RunningJob | None:
        with self._lock:
            return self._running.get(request_id)

    def by_job(self, job_id: str) -> RunningJob | None:
        with self._lock:
            token = self._leases.get(job_id)
            return None if token is None else self._running.get(f"{job_id}#{token}")

    def leases(self) -> list[tuple[str, int]]:
        with self._lock:
            return list(self._leases.items())

    def running(self) -> list[RunningJob]:
        with self._lock:
            return list(self._running.values())

    def __len__(self) -> int:
        """Return the number of jobs held."""
        return len(self._leases)
