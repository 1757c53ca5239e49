"""Length-prefixed messages over a stream."""

from __future__ import annotations

import struct
from collections.abc import Iterator

_LENGTH = struct.Struct("<I")


def frame(message: bytes) -> bytes:
    return _LENGTH.pack(len(message)) + message


class FrameReader:
    """Reassembles messages from arbitrary pieces."""

    def __init__(self) -> None:
        self._received = bytearray()

    def messages(self, received: bytes) -> Iterator[bytes]:
        """Yield the messages that these bytes complete."""
        self._received += received
        while len(self._received) >= _LENGTH.size:
            end = _LENGTH.size + _LENGTH.unpack_from(self._received)[0]
            if len(self._received) < end:
                return
            message = bytes(self._received[_LENGTH.size : end])
            del self._received[:end]
            yield message
