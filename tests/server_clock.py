"""A server whose clock the test sets, by libfaketime."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.conftest import RedisServer, server_binary

LIBRARY = Path("/usr/lib/x86_64-linux-gnu/faketime/libfaketime.so.1")


@dataclass(frozen=True)
class ClockedServer:
    server: RedisServer
    file: Path

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        """Also again, after a kill: at the time that was set last."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(LIBRARY))
            patch.setenv("FAKETIME_TIMESTAMP_FILE", str(self.file))
            patch.setenv("FAKETIME_NO_CACHE", "1")
            patch.setenv("TZ", "UTC")
            patch.setenv("FAKETIME_DONT_FAKE_MONOTONIC", "1")
            self.server.start()

    def set(self, offset_s: int) -> None:
        """Seconds ahead of the machine's own clock, and going on as that does."""
        self._write(f"{offset_s:+d}", lambda now: abs(now - time.time() - offset_s) <= 2)

    def stop_at(self, unix_s: int) -> None:
        """It is that time until another is set: nothing depends on how long anything takes."""
        text = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(unix_s))
        self._write(text, lambda now: now == unix_s)

    def _write(self, text: str, is_seen: Callable[[int], bool]) -> None:
        """libfaketime looks at the file at every call."""
        coming = self.file.with_suffix(".new")
        coming.write_text(text)
        coming.replace(self.file)
        give_up = time.monotonic() + 60
        with redis.Redis.from_url(self.url, socket_timeout=30, retry=None) as client:
            while not is_seen(client.time()[0]):
                assert time.monotonic() < give_up, "the server does not see its new time"
                time.sleep(0.005)


@contextmanager
def clocked_server(
    directory: Path, binary: str = "valkey-server", options: tuple[str, ...] = ()
) -> Iterator[ClockedServer]:
    """Skips the test where there is no libfaketime."""
    if not LIBRARY.exists():
        pytest.skip("no libfaketime on this machine: apt-get install faketime")
    directory.mkdir(parents=True, exist_ok=True)
    file = directory / "clock"
    file.write_text("+0")
    clocked = ClockedServer(RedisServer(server_binary(binary), directory / binary, options), file)
    clocked.start()
    try:
        yield clocked
    finally:
        clocked.server.kill()
