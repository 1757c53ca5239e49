"""Celery's `revoke` for native tasks: received on Celery's control channel, performed as a cancellation."""

from __future__ import annotations

import logging
import os
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from celery import Celery
from kombu.utils.functional import maybe_list

from pagemill.producer.celery.task_message import TaskMessage
from pagemill.producer.wire.calls import reads, transitions
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.server.transport import SyncTransport

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

LISTEN_S = 1.0
AWAY_S = 1.0


class Revocations:
    """Listens for revocations on a thread and passes their task ids to `revoke(ids, terminate)`."""

    def __init__(self, app: Celery, revoke: Callable[[Sequence[str], bool], None]) -> None:
        self._app = app
        self._revoke = revoke
        self._stop = threading.Event()
        self._name = f"pagemill-relay-{os.getpid()}@{socket.gethostname()}"
        self._thread = threading.Thread(target=self._run, name="revocations", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(2 * LISTEN_S)

    def _run(self) -> None:
        self._app.set_current()
        while not self._stop.is_set():
            try:
                self._listen()
            except Exception as error:  # any error of the broker's client: listen again
                logger.warning("no revocations: %s", error, extra=IN_LOOP)
                self._stop.wait(AWAY_S)

    def _listen(self) -> None:
        with self._app.connection_for_read() as connection:
            node = self._app.control.mailbox.Node(self._name, channel=connection.channel())
            with node.listen(callback=self._on_control_message):
                while not self._stop.is_set():
                    try:
                        connection.drain_events(timeout=LISTEN_S)
                    except TimeoutError:
                        continue

    def _on_control_message(self, body: Mapping[str, Any], _: Any) -> None:
        destination = body.get("destination")
        if body.get("method") != "revoke" or (destination and self._name not in destination):
            return
        given = body.get("arguments") or {}
        self._revoke(
            [str(task_id) for task_id in maybe_list(given.get("task_id")) or ()], bool(given.get("terminate"))
        )


def revoke_jobs(queue: str, transport: SyncTransport, task_ids: Sequence[str], terminate: bool) -> None:
    """Cancel the jobs of native tasks. Without `terminate` only waiting ones, like Celery."""
    found = [
        status.id
        for page in reads.status_pages(transport.run, queue, task_ids)
        for status in page
        if status is not None
        and TaskMessage.from_metadata(status.metadata) is not None
        and (status.state in ("queued", "delayed") or (terminate and status.state == "running"))
    ]
    if found:
        transport.run(transitions.cancel(queue, found))
        logger.info("revoked in queue %s: %s", queue, ", ".join(found))
