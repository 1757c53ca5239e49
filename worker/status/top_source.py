"""The data source of `pagemill top`: the queue's registry in Redis, and a worker's `/live.json`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from typing import Any

from pagemill.monitoring.live.feed import OtherWorker
from pagemill.monitoring.live.top import TopView
from pagemill.monitoring.queue_figures import QueueFigures
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.worker.job_queue import JobQueue, ReaderConnectivity
from pagemill.worker.status.queue_reader import queue_figures

HTTP_TIMEOUT_S = 5.0


class TopSource:
    """Takes successive readings of the worker at `url`, or of one in the registry."""

    def __init__(
        self, redis_url: str | None, queue: str, *, url: str | None = None, worker_id: str | None = None
    ) -> None:
        """`redis_url` None: read only from the worker at `url`."""
        self._url = url
        self._worker_id = worker_id
        self._queue = (
            None if redis_url is None else JobQueue(redis_url, queue, "top", 0, ReaderConnectivity())
        )

    def read(self) -> TopView:
        """Take a reading. Unavailable data is noted in the view."""
        notes: list[str] = []
        figures, workers = self._read_queue(notes)
        live = self._read_live(workers, notes)
        lines = [
            OtherWorker(worker.id, worker.state, worker.models, worker.running, worker.url)
            for worker in workers
        ]
        return TopView(figures, lines, live, notes)

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()

    def _read_queue(self, notes: list[str]) -> tuple[QueueFigures | None, list[WorkerInfo]]:
        if self._queue is None:
            return None, []
        try:
            name = self._queue.queue
            stats = registry.stats(self._queue.run, name)
            workers = self._queue.run(registry.workers(name))
            return queue_figures(name, stats, workers, None, self._queue.server_time()), workers
        except RedisUnavailable as error:
            notes.append(str(error))
            return None, []

    def _read_live(self, workers: Sequence[WorkerInfo], notes: list[str]) -> dict[str, Any] | None:
        if self._url is not None:
            return _fetch(self._url, notes)
        known = [worker for worker in workers if worker.url and self._worker_id in (None, worker.id)]
        if self._worker_id is not None and not known and self._queue is not None:
            notes.append(f"no live worker {self._worker_id}; pagemill workers lists them")
        for worker in known:
            if worker.url and (found := _fetch(worker.url, notes)) is not None:
                return found
        return None


def _fetch(url: str, notes: list[str]) -> dict[str, Any] | None:
    """Fetch a worker's document; if that fails, return None and add a note."""
    address = f"{url.rstrip('/')}/live.json"
    try:
        with urllib.request.urlopen(address, timeout=HTTP_TIMEOUT_S) as answer:
            document: dict[str, Any] = json.load(answer)
    except urllib.error.HTTPError as error:
        with error:
            notes.append(f"{url}: {error.read(300).decode('utf-8', 'replace').strip() or error}")
        return None
    except (OSError, ValueError) as error:
        notes.append(f"{url}: {error}")
        return None
    return document
