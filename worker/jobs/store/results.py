"""Writes large results to the store before they are committed, on separate threads.

A file is announced before it is written, and has no owner until a commit names it: files left behind by a
lost race or a crashed worker are deleted by the sweep. If the store fails, the result is written to Redis.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

from pagemill.producer.wire.calls import stored
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.store.store import Store, reference_to
from pagemill.producer.wire.store.stub import result_stub
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.ending import End, end
from pagemill.worker.jobs.running_job import Outcome

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

NUM_THREADS = 4
MAX_WAITING_BYTES = 64 << 20
"""Results that wait for a slow store; further ones are written to Redis."""


class StoredResults:
    """Results being written to the store."""

    def __init__(self, store: Store, new_queue: Callable[[], JobQueue]) -> None:
        self._store = store
        self._queues = [new_queue() for _ in range(NUM_THREADS)]
        self._wanted: SimpleQueue[End | str | None] = SimpleQueue()
        """Results to write, and URIs to delete; None ends a thread."""
        self._waiting_bytes = 0
        self._lock = threading.Lock()
        self._on_written: Callable[[End], None] = lambda end: None

    def start(self, on_written: Callable[[End], None]) -> None:
        """`on_written` receives each end that may be sent: of a stub, or if the store failed, unchanged."""
        self._on_written = on_written
        for queue in self._queues:
            # A daemon, so that a store that never answers does not keep the process alive.
            threading.Thread(target=self._run, args=(queue,), name="pagemill-store", daemon=True).start()

    def stop(self) -> None:
        """End the threads once they are idle."""
        for _ in self._queues:
            self._wanted.put(None)

    def takes(self, ended: End) -> bool:
        """Return whether an end has a result that belongs in the store."""
        if ended.outcome is not Outcome.SUCCEEDED or not self._store.takes(len(ended.body)):
            return False
        return self._waiting_bytes < MAX_WAITING_BYTES

    def write(self, ended: End) -> None:
        self._count(len(ended.body))
        self._wanted.put(ended)

    def _count(self, num_bytes: int) -> None:
        with self._lock:
            self._waiting_bytes += num_bytes

    def discard(self, uri: str) -> None:
        """Have a result deleted that was not committed."""
        self._wanted.put(uri)

    def _run(self, queue: JobQueue) -> None:
        while (wanted := self._wanted.get()) is not None:
            try:
                if isinstance(wanted, str):
                    queue.run(stored.announce(queue.queue, [wanted], within_ms=0))
                else:
                    self._on_written(self._written(queue, wanted))
            except PagemillError as error:
                logger.warning("a result was not written to the store: %s", error, extra=IN_LOOP)
                if not isinstance(wanted, str):
                    self._on_written(wanted)
            except Exception:
                logger.exception("writing a result to the store failed; continuing")
                if not isinstance(wanted, str):
                    self._on_written(wanted)
            finally:
                if not isinstance(wanted, str):
                    self._count(-len(wanted.body))

    def _written(self, queue: JobQueue, ended: End) -> End:
        assert ended.job is not None, "only a job that ran has a result"
        uri = self._store.new_uri(queue.queue, "out", ended.job_id)
        queue.run(stored.announce(queue.queue, [uri]))
        self._store.write(uri, ended.body)
        stub = result_stub(reference_to(uri, ended.body))
        return end(queue.queue, ended.job, Outcome.SUCCEEDED, result=stub, stored=uri)
