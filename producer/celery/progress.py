"""PROGRESS for native tasks: the state in Celery's backend while their jobs run."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from celery import Celery, states
from celery.exceptions import TaskRevokedError

from pagemill.producer.celery.native import RELAY
from pagemill.producer.celery.task import PROGRESS
from pagemill.producer.celery.task_message import TaskMessage, with_result
from pagemill.producer.wire.calls import reads, registry
from pagemill.producer.wire.schema.errors import StoreError
from pagemill.producer.wire.schema.outputs import JobStatus
from pagemill.producer.wire.server.transport import SyncTransport

logger = logging.getLogger(__name__)

PAGE = 500


class ProgressWriter:
    """Stores PROGRESS with a job's `Progress` as meta, for each native task of a queue that has new tokens."""

    def __init__(self, app: Celery, queue: str, transport: SyncTransport) -> None:
        self._app = app
        self._queue = queue
        self._transport = transport
        self._told: dict[str, int] = {}
        """Generated tokens of running tasks as last written."""

    def write(self) -> None:
        """Check every running task once."""
        running = self._running()
        self._told = {job_id: self._told.get(job_id, 0) for job_id in running}
        for found in reads.status_pages(self._transport.run, self._queue, running):
            self.store([status for status in found if status is not None])

    def store(self, statuses: Sequence[JobStatus]) -> None:
        """Store changes in `statuses`, which may be slightly outdated: an end is not overwritten."""
        written = {}
        for status in statuses:
            tokens = status.progress.generated_tokens
            message = TaskMessage.from_metadata(status.metadata)
            if status.done or message is None or not message.wants_result:
                continue
            if tokens > self._told.get(status.id, 0):
                self._told[status.id] = tokens
                self._app.backend.store_result(status.id, status.progress.model_dump(mode="json"), PROGRESS)
                written[status.id] = message
        self._restore(written)

    def _running(self) -> list[str]:
        running: list[str] = []
        skip = 0
        while True:
            page = self._transport.run(registry.running(self._queue, skip, PAGE, relay=RELAY))
            running += page.job_ids
            skip += page.looked
            if page.looked < PAGE:
                return list(dict.fromkeys(running))

    def _restore(self, written: dict[str, TaskMessage]) -> None:
        """Store the end again of tasks that ended meanwhile: another relay may have written it earlier."""
        job_ids = list(written)
        if not job_ids:
            return
        ends = self._transport.run(reads.ends(self._queue, job_ids))
        for job_id in (job_id for job_id, ended in zip(job_ids, ends, strict=True) if ended):
            outcome = self._transport.run(reads.outcome(self._queue, job_id))
            if outcome.state is None:
                continue
            try:
                end = written[job_id].end(with_result(outcome))
            except StoreError:
                continue  # the relay that wrote it has the end, or will retry
            if isinstance(end, TaskRevokedError):
                state = states.REVOKED
            else:
                state = states.FAILURE if isinstance(end, BaseException) else states.SUCCESS
            self._app.backend.store_result(job_id, end, state)
