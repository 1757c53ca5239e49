"""A Valkey whose clock the test sets, by libfaketime."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.conftest import RedisServer, server_binary

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@dataclass(frozen=True)
class ClockedServer:
    server: RedisServer
    file: Path

    @property
    def url(self) -> str:
        return self.server.url

    def set(self, offset_s: int) -> None:
        """Seconds ahead of the machine's own clock; libfaketime looks at the file at every call."""
        self.file.write_text(f"{offset_s:+d}")
        time.sleep(0.15)


@contextmanager
def clocked_server(directory: Path) -> Iterator[ClockedServer]:
    """Skips the test where there is no libfaketime."""
    if not LIBRARY.exists():
        pytest.skip("no libfaketime on this machine: apt-get install faketime")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "clock"
    file.write_text("+0")
    server = RedisServer(server_binary("valkey-server"), directory / "valkey")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LD_PRELOAD", str(LIBRARY))
        patch.setenv("FAKETIME_TIMESTAMP_FILE", str(file))
        patch.setenv("FAKETIME_NO_CACHE", "1")
        patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
        server.start()
    try:
        yield ClockedServer(server, file)
    finally:
        server.kill()
