"""Periodic deletion of store files whose jobs no longer exist."""

from __future__ import annotations

import logging

from pagemill.producer.wire.calls import stored
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError, StoreError
from pagemill.producer.wire.store.store import Store
from pagemill.worker.background import BackgroundThread
from pagemill.worker.job_queue import JobQueue

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

AT_ONCE = 64
CLAIM_MS = 60_000
LOOK_S = 5.0


class StoreSweeper(BackgroundThread):
    """The sweeping thread. Any number of workers may sweep a queue: each file is claimed by one at a time."""

    def __init__(self, store: Store, queue: JobQueue) -> None:
        super().__init__("pagemill-store-sweep")
        self._store = store
        self._queue = queue

    def sweep(self) -> int:
        """Delete due files. Returns the number of files checked."""
        uris = self._queue.run(stored.claim(self._queue.queue, AT_ONCE, CLAIM_MS))
        gone: list[str] = []
        for uri in uris:
            try:
                self._store.delete(uri)
                gone.append(uri)
            except StoreError as error:
                logger.warning("a file of the store was not deleted: %s", error, extra=IN_LOOP)
        if gone:
            self._queue.run(stored.forget(self._queue.queue, gone))
        return len(uris)

    def _run(self) -> None:
        while not self._stop.is_set():
            looked = 0
            try:
                looked = self.sweep()
            except PagemillError as error:
                logger.debug("the store was not swept: %s", error)
            except Exception:
                logger.exception("sweeping the store failed; continuing")
            self._stop.wait(0.0 if looked == AT_ONCE else LOOK_S)
