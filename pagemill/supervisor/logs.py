"""One stream for the logs of several processes, with the process name in each line."""

from __future__ import annotations

import contextlib
import io
import json
import threading
import time
from typing import IO, BinaryIO

from pagemill.monitoring.logging import LogFormat

MAX_LINE_BYTES = 64 << 10
"""A longer line is cut into several."""


class LogStream:
    """Writes complete lines of several processes: with a prefix in text, or a field `process` in JSON.

    Thread-safe. A line that is not a JSON object becomes the message of one.
    """

    def __init__(self, out: BinaryIO, format: LogFormat, width: int = 0) -> None:
        """`width`: length of the longest name."""
        self._out = out
        self._is_json = format == "json"
        self._width = width
        self._lock = threading.Lock()

    def write(self, name: str, line: bytes) -> None:
        """Write one line of the process `name`. A closed stream discards it."""
        text = line.rstrip(b"\r\n")
        log_line = _with_field(name, text) if self._is_json else f"{name:<{self._width}} | ".encode() + text
        with self._lock, contextlib.suppress(OSError, ValueError):
            self._out.write(log_line + b"\n")
            self._out.flush()

    def pump(self, name: str, source: IO[bytes]) -> threading.Thread:
        """Copy a process's output on a separate thread, until the process exits."""

        def run() -> None:
            with source:
                while line := source.readline(MAX_LINE_BYTES):
                    self.write(name, line)

        thread = threading.Thread(target=run, name=f"pagemill-log-{name}", daemon=True)
        thread.start()
        return thread

    def writer(self, name: str) -> io.TextIOBase:
        """Return a text stream for this process's logging."""
        return _Writer(self, name)


class _Writer(io.TextIOBase):
    def __init__(self, stream: LogStream, name: str) -> None:
        self._stream = stream
        self._name = name

    def write(self, text: str) -> int:
        for line in text.splitlines():
            self._stream.write(self._name, line.encode(errors="replace"))
        return len(text)

    def isatty(self) -> bool:
        return False


def _with_field(name: str, line: bytes) -> bytes:
    field = b'{"process":%s' % json.dumps(name).encode()
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if isinstance(record, dict):
        return field + (b", " + line.strip()[1:] if record else b"}")
    # Not from a logger: final output of an interpreter or a library.
    message = {
        "time": time.time(),
        "level": "info",
        "logger": "stderr",
        "message": line.decode(errors="replace"),
    }
    return field + b", " + json.dumps(message, ensure_ascii=False).encode()[1:]
