"""A process with limits for code of unbounded time or memory. Native code cannot be stopped in a thread.

The process starts on first use, serves one call at a time, and is replaced after a call that exceeded a limit.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import weakref
from collections.abc import Sequence
from typing import Any

from pagemill.engine.child_messages import Reader, pack
from pagemill.engine.child_process import environment
from pagemill.engine.errors import EngineError

WAIT_S = 60.0
"""Wall-clock time in seconds after which a call is aborted, regardless of the CPU time of the process."""
_CHUNK = 1 << 20


class Refused(Exception):
    """The code in the process raised an error, which the message quotes."""


class Exceeded(Exception):
    """A call exceeded a limit; the message names it."""


class LimitedProcess:
    """Calls functions of a `LimitedServer` in another process. Thread-safe."""

    def __init__(self, module: str, arguments: Sequence[object], limits: str) -> None:
        """Create it without a process.

        Args:
            module: the module that runs in the process.
            arguments: its arguments after the number of its socket.
            limits: text that describes a call's limits, for the message of `Exceeded`.
        """
        self._module, self._arguments, self._limits = module, arguments, limits
        self._lock = threading.Lock()
        self._connection: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._reader = Reader()
        self._closing: weakref.finalize[Any, Any] | None = None

    def close(self) -> None:
        """Stop the process. The next call starts another."""
        if self._closing is not None:
            self._closing()
        self._connection = self._closing = self._process = None

    def _call(self, *message: Any) -> Any:
        """Call a function and return its result. Raises Refused, Exceeded, or EngineError if no process starts."""
        packed = pack(*message)
        with self._lock:
            if self._process is not None and self._process.poll() is not None:
                self.close()  # terminated externally, between two calls
            if self._connection is None:
                self._start()
            return self._answer(packed, self._limits)

    def _start(self) -> None:
        self._connection, theirs = socket.socketpair()
        self._connection.settimeout(WAIT_S)
        self._reader = Reader()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-m", self._module]
                + [str(argument) for argument in (theirs.fileno(), *self._arguments)],
                env=environment()
                | {"TOKENIZERS_PARALLELISM": "false"},  # threads reserve more memory than it has
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent; the process exits when its socket closes
            )
        self._closing = weakref.finalize(self, _end, self._process, self._connection)
        try:
            self._answer(pack("greet"), "does not start")
        except Exceeded:
            raise EngineError(f"the process of {self._module} does not start") from None

    def _answer(self, packed: bytes, limits: str) -> Any:
        """Send a message and return the reply. Raises Refused, or Exceeded with `limits`."""
        assert self._connection is not None
        try:
            self._connection.sendall(packed)
            while received := self._connection.recv(_CHUNK):
                for is_good, value in self._reader.messages(received):
                    if not is_good:
                        raise Refused(value)
                    return value
        except OSError:  # the process has ended, or uses no CPU time either
            pass
        except BaseException:
            if sys.exc_info()[0] is not Refused:
                self.close()  # an interrupted call leaves its reply unread
            raise
        self.close()
        raise Exceeded(limits)


def _end(process: subprocess.Popen[bytes], connection: socket.socket) -> None:
    connection.close()
    process.kill()
    process.wait()
