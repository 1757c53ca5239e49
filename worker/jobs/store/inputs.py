"""Fetches payloads from the store on threads of its own, so that a slow store delays nobody else's jobs."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, replace
from queue import Empty, SimpleQueue

from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import StoreError
from pagemill.producer.wire.store.store import Store
from pagemill.producer.wire.store.stub import Reference

NUM_THREADS = 4


@dataclass(frozen=True, slots=True)
class Fetched:
    """A pulled job with its payload, or why that is not to be had."""

    pulled: PulledJob
    error: StoreError | None = None


class StoredInputs:
    """Jobs whose payloads are on their way. Used by admission's thread alone."""

    def __init__(self, store: Store, timeout_s: float) -> None:
        self._store = store
        self._timeout_s = timeout_s
        self._wanted: SimpleQueue[tuple[PulledJob, Reference] | None] = SimpleQueue()
        self._arrived: SimpleQueue[Fetched] = SimpleQueue()
        self._pending: dict[int, tuple[PulledJob, float]] = {}
        """By fencing token: the job, and `time.monotonic()` when it is given up."""
        self._threads: list[threading.Thread] = []

    @property
    def num_pending(self) -> int:
        return len(self._pending)

    def fetch(self, pulled: PulledJob, reference: Reference) -> None:
        """Begin to fetch a job's payload."""
        if len(self._threads) < NUM_THREADS:
            # A daemon: a store that never answers must not keep the process.
            thread = threading.Thread(target=self._run, name="pagemill-fetch", daemon=True)
            self._threads.append(thread)
            thread.start()
        self._pending[pulled.token] = (pulled, time.monotonic() + self._timeout_s)
        self._wanted.put((pulled, reference))

    def arrived(self) -> list[Fetched]:
        """Return the jobs whose payloads are there, failed, or are late."""
        found: list[Fetched] = []
        try:
            while True:
                one = self._arrived.get_nowait()
                if self._pending.pop(one.pulled.token, None) is not None:
                    found.append(one)
        except Empty:
            pass
        now = time.monotonic()
        for token, (pulled, give_up_at) in list(self._pending.items()):
            if now >= give_up_at:
                del self._pending[token]
                late = StoreError(f"the store did not answer within {self._timeout_s:g} s", "away")
                found.append(Fetched(pulled, late))
        return found

    def abandon(self) -> list[PulledJob]:
        """Return the jobs that are still on their way; they will not arrive."""
        pulled = [pulled for pulled, _ in self._pending.values()]
        self._pending.clear()
        for _ in self._threads:
            self._wanted.put(None)
        return pulled

    def _run(self) -> None:
        while (wanted := self._wanted.get()) is not None:
            pulled, reference = wanted
            try:
                payload = self._store.read(reference)
            except StoreError as error:
                self._arrived.put(Fetched(pulled, error))
            except Exception as error:
                problem = StoreError(f"the store fails with {type(error).__name__}", "away")
                self._arrived.put(Fetched(pulled, problem))
            else:
                self._arrived.put(Fetched(replace(pulled, payload=payload, fetched_for=reference.tenant)))
