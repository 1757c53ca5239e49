"""The process that holds the vocabulary and forks the schemas' processes: see `server.py`."""

from __future__ import annotations

import socket
import subprocess
import sys
import tempfile
import weakref

from pagemill.engine.child_process import environment
from pagemill.engine.structured_output.server import MEMORY_LIMIT_MIB, TIME_LIMIT_S
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary

_CHUNK = 1 << 16


class ForkServer:
    """Starts its process on first use, and again after it exited."""

    def __init__(
        self,
        vocabulary: GrammarVocabulary,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        memory_limit_mib: int = MEMORY_LIMIT_MIB,
    ) -> None:
        self.time_limit_s = time_limit_s
        self.memory_limit_mib = memory_limit_mib
        self.received = memoryview(bytearray(_CHUNK))
        """Buffer for one read of a process's socket; only the engine's thread reads them."""
        self.process: subprocess.Popen[bytes] | None = None
        self._vocabulary = vocabulary
        self._control: socket.socket | None = None
        self._closing: weakref.finalize[..., ForkServer] | None = None

    def start(self) -> None:
        """Start the process. Returns immediately: requests are served once it has read the vocabulary."""
        if self.process is not None and self.process.poll() is None:
            return
        self._control, theirs = socket.socketpair()
        with theirs, tempfile.TemporaryFile("w+", encoding="utf-8") as vocabulary:
            vocabulary.write(self._vocabulary.dump())
            vocabulary.seek(0)
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pagemill.engine.structured_output.server"]
                + [str(number) for number in (theirs.fileno(), self.time_limit_s, self.memory_limit_mib)],
                env=environment(),
                stdin=vocabulary,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,  # Ctrl-C is for the parent; the children exit when their sockets close
            )
        self._closing = weakref.finalize(self, _end, self.process, self._control)

    def close(self) -> None:
        """Stop the process; those of schemas exit with their sockets."""
        if self._closing is not None:
            self._closing()
        self.process = self._control = self._closing = None

    def fork(self) -> socket.socket:
        """Return a non-blocking socket to a new process. If there is none, it closes without data."""
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with theirs:
            for _ in range(2):
                self.start()
                assert self._control is not None
                try:
                    socket.send_fds(self._control, [b"+"], [theirs.fileno()])
                    break
                except OSError:  # it has exited, or is about to
                    self.process = None
        return ours


def _end(process: subprocess.Popen[bytes], control: socket.socket) -> None:
    control.close()
    process.kill()
    process.wait()
