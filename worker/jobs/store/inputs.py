"""Opens envelopes on separate threads, so that a slow store or image decoding does not delay other jobs."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from queue import Empty, SimpleQueue

from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import JobError
from pagemill.producer.wire.schema.job import Job

NUM_THREADS = 4

Opened = tuple[PulledJob, "Future[Job]"]
"""A pulled job, and the future of its opened envelope."""


class StoredInputs:
    """Jobs whose payloads are being fetched or prepared. Used only by admission's thread."""

    def __init__(self, open_envelope: Callable[[PulledJob], Job], timeout_s: float) -> None:
        self._open_envelope = open_envelope
        self._timeout_s = timeout_s
        self._wanted: SimpleQueue[PulledJob | None] = SimpleQueue()
        self._arrived: SimpleQueue[Opened] = SimpleQueue()
        self._pending: dict[int, tuple[PulledJob, float]] = {}
        """By fencing token: the job, and the `time.monotonic()` at which fetching is given up."""
        self._threads: list[threading.Thread] = []

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def is_pending(self, pulled: PulledJob) -> bool:
        return pulled.token in self._pending

    def fetch(self, pulled: PulledJob) -> None:
        """Start to open a job's envelope."""
        if len(self._threads) < NUM_THREADS:
            # A daemon, so that a store that never answers does not keep the process alive.
            thread = threading.Thread(target=self._run, name="pagemill-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._pending[pulled.token] = (pulled, time.monotonic() + self._timeout_s)
        self._wanted.put(pulled)

    def arrived(self) -> Opened | None:
        """Return the next job whose envelope is open, cannot be opened, or is late; None if there is none."""
        with suppress(Empty):
            while True:
                pulled, opened = self._arrived.get_nowait()
                if self._pending.pop(pulled.token, None) is not None:
                    return pulled, opened
        now = time.monotonic()
        for token, (pulled, give_up_at) in self._pending.items():
            if now >= give_up_at:
                del self._pending[token]
                late: Future[Job] = Future()
                message = f"the store did not answer within {self._timeout_s:g} s"
                late.set_exception(JobError(message, "store_unavailable", retryable=True))
                return pulled, late
        return None

    def abandon(self) -> list[PulledJob]:
        """Return the jobs that are still being fetched; they will not arrive."""
        pulled = [pulled for pulled, _ in self._pending.values()]
        self._pending.clear()
        for _ in self._threads:
            self._wanted.put(None)
        return pulled

    def _run(self) -> None:
        while (pulled := self._wanted.get()) is not None:
            opened: Future[Job] = Future()
            try:
                opened.set_result(self._open_envelope(pulled))
            except Exception as error:
                opened.set_exception(error)
            self._arrived.put((pulled, opened))
