"""Redis' protocol as a client needs it that is to cost much less than the server it loads."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class ServerError(Exception):
    """The server refused a command; the message is its own."""


def pack(command: Sequence[str | bytes | int | float]) -> bytes:
    """A command as the server reads it."""
    parts = [b"*%d\r\n" % len(command)]
    for word in command:
        data = word if isinstance(word, bytes) else str(word).encode()
        parts.append(b"$%d\r\n%b\r\n" % (len(data), data))
    return b"".join(parts)


class Replies:
    """The replies to a pipeline, from bytes as they arrive."""

    def __init__(self, expected: int) -> None:
        self.values: list[Any] = []
        self._expected = expected
        self._buffer = b""
        self._at = 0

    def feed(self, data: bytes) -> bool:
        """Take more bytes; True once every reply is there. Raises ServerError for a reply that is one."""
        self._buffer = self._buffer[self._at :] + data
        self._at = 0
        while len(self.values) < self._expected:
            start = self._at
            try:
                self.values.append(self._read())
            except IndexError:  # the rest is still on its way
                self._at = start
                return False
        return True

    def _read(self) -> Any:
        end = self._buffer.find(b"\r\n", self._at)
        if end < 0:
            raise IndexError
        kind, line = self._buffer[self._at : self._at + 1], self._buffer[self._at + 1 : end]
        self._at = end + 2
        match kind:
            case b"$":
                return self._bulk(int(line))
            case b":":
                return int(line)
            case b"*":
                return None if line == b"-1" else [self._read() for _ in range(int(line))]
            case b"+":
                return line
            case _:
                raise ServerError(line.decode(errors="replace"))

    def _bulk(self, size: int) -> bytes | None:
        if size < 0:
            return None
        start, end = self._at, self._at + size
        if len(self._buffer) < end + 2:
            raise IndexError
        self._at = end + 2
        return self._buffer[start:end]
