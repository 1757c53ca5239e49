"""Messages to and from a child process: tuples, marshalled and length-prefixed, over a stream."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator
from typing import Any

_LENGTH = struct.Struct("<I")


def pack(*values: Any) -> bytes:
    message = marshal.dumps(values)
    return _LENGTH.pack(len(message)) + message


class Reader:
    """Reassembles messages from arbitrary pieces."""

    def __init__(self) -> None:
        self._received = bytearray()

    def messages(self, received: bytes | memoryview) -> Iterator[tuple[Any, ...]]:
        """Yield the messages that these bytes complete."""
        self._received += received
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            with memoryview(self._received) as view:
                message: tuple[Any, ...] = marshal.loads(view[_LENGTH.size : end])
            del self._received[:end]
            yield message
