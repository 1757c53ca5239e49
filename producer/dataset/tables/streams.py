"""A stream that can be read repeatedly from its start: the parts read so far are kept in a temporary file."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Callable
from pathlib import PurePath
from typing import IO

from pagemill.producer.dataset.errors import DiskError

CHUNK_BYTES = 1 << 20


class Stream:
    """Input without a file: standard input, or data from a server.

    It is read as far as requested, so work starts with its first rows; memory does not grow with it. The file has no
    name, and disappears with the process.
    """

    def __init__(self, source: IO[bytes], path: PurePath, name: str, start: bytes = b"") -> None:
        """`path` determines the format and compression, `name` is for messages, `start` has already been read."""
        self.path = path
        self.name = name
        self.is_whole = False
        # For a pipe, returns the available bytes; a read would wait for the requested number.
        self._read: Callable[[int], bytes] = getattr(source, "read1", source.read)
        self._kept = tempfile.TemporaryFile(prefix="pagemill-rows-")  # noqa: SIM115
        self._size = self._kept.write(start)

    def __str__(self) -> str:
        return self.name

    def open(self, mode: str = "rb") -> IO[bytes]:
        """Return a separate reader, at the start. Reads raise DiskError if the stream is interrupted."""
        return io.BufferedReader(_Reader(self), CHUNK_BYTES)

    def close(self) -> None:
        """Delete the data read so far; the source stays open."""
        self._kept.close()

    def read_at(self, position: int, count: int) -> bytes:
        """Return up to `count` bytes; none at the end."""
        while position >= self._size and not self.is_whole:
            self._read_on()
        self._kept.seek(position)
        return self._kept.read(count)

    def size(self) -> int:
        """Read the rest; returns the number of bytes."""
        while not self.is_whole:
            self._read_on()
        return self._size

    def _read_on(self) -> None:
        again = "run the same command again; nothing that was done is lost"
        try:
            data = self._read(CHUNK_BYTES)
        except Exception as error:  # of any library that reads it; its message may contain a secret
            kind = type(error).__name__
            raise DiskError(f"{self.name} broke off after {self._size:,} bytes ({kind}): {again}") from None
        try:
            self._kept.seek(0, io.SEEK_END)
            self._size += self._kept.write(data)
            self._kept.flush()
        except OSError as error:
            place = tempfile.gettempdir()
            raise DiskError(
                f"{place} has no room for what was read of {self.name} ({error.strerror}): name another folder "
                f"with TMPDIR, and {again}"
            ) from error
        self.is_whole = not data


class _Reader(io.RawIOBase):
    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._position = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position}
        self._position = offset + (self._stream.size() if whence == io.SEEK_END else base[whence])
        return self._position

    def tell(self) -> int:
        return self._position

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        data = self._stream.read_at(self._position, len(buffer))
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)
