"""Sends commands to an engine's process on a separate thread, so that an abort does not wait for a hung process."""

from __future__ import annotations

import pickle
import threading
from collections import deque
from multiprocessing.connection import Connection

from pagemill.worker.engine_host.codec import PROTOCOL
from pagemill.worker.engine_host.messages import ChangeAdapter, Command, StartEngine

MAX_UNSENT_BYTES = 32 << 20
"""Requests wait for the other side beyond this; other messages are small and are queued immediately."""


class Sender:
    """The thread ends at `close`, or when the other side has ended."""

    def __init__(self, connection: Connection, max_unsent_bytes: int = MAX_UNSENT_BYTES) -> None:
        self._connection = connection
        self._max_unsent_bytes = max_unsent_bytes
        self._unsent: deque[bytes] = deque()
        self._num_bytes = 0
        self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="pagemill-engine-commands", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def put(self, message: Command | ChangeAdapter | StartEngine, *, waits: bool = False) -> None:
        """Queue a message; with `waits`, once there is capacity. Messages after `close` are dropped."""
        data = pickle.dumps(message, PROTOCOL)
        with self._changed:
            while waits and self._unsent and self._num_bytes + len(data) > self._max_unsent_bytes:
                if self._is_closed:
                    return
                self._changed.wait()
            self._unsent.append(data)
            self._num_bytes += len(data)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _run(self) -> None:
        try:
            while (data := self._next()) is not None:
                self._connection.send_bytes(data)
        except OSError:  # the receiving thread reports that the process has ended, and why
            self.close()

    def _next(self) -> bytes | None:
        with self._changed:
            self._changed.wait_for(lambda: self._unsent or self._is_closed)
            if self._is_closed:
                return None
            data = self._unsent.popleft()
            self._num_bytes -= len(data)
            self._changed.notify_all()
            return data
