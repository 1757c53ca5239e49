"""The process side of `LimitedProcess`: kernel alarms and a memory limit stop it even in native code."""

from __future__ import annotations

import signal
import socket
from collections.abc import Iterator
from typing import Any

from pagemill.engine.child_messages import Reader, pack

_CHUNK = 1 << 20


class LimitedServer:
    """Replies to calls of its methods `_NAME` with a tuple of (True, value), or of (False, reason)."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    def run(self) -> None:
        """Process calls until the socket is closed, or a call exceeds a limit."""
        for kind, *values in self._messages():
            try:
                answer = True, getattr(self, f"_{kind}")(*values)
            except MemoryError:
                return  # the remaining memory is unknown: the next call gets a new process
            except Exception as error:  # foreign code raises anything
                answer = False, str(error).strip() or type(error).__name__
            except BaseException as error:  # a panic in Rust is not an Exception
                answer = False, f"{type(error).__name__}: {error}"
            self._arm(0.0)
            self._connection.sendall(pack(*answer))

    def _greet(self) -> None:
        """Reply to the first call: the process has started."""

    def _arm(self, seconds: float) -> None:
        """Stop the process after this much more CPU time; 0: never."""
        signal.setitimer(signal.ITIMER_PROF, seconds)

    def _messages(self) -> Iterator[tuple[Any, ...]]:
        reader = Reader()
        while received := self._connection.recv(_CHUNK):
            yield from reader.messages(received)
