"""Processes whose wall clock the test sets, with a library that is preloaded into them (shifted_clock.c)."""

from __future__ import annotations

import shutil
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from tests.conftest import ROOT, RedisServer, server_binary


def build_library(directory: Path) -> Path:
    """Compile the library. Raises FileNotFoundError without a C compiler."""
    library = directory / "shifted_clock.so"
    compiler = shutil.which("cc")
    if compiler is None:
        raise FileNotFoundError("cc is missing; install the package gcc")
    source = ROOT / "tests/shifted_clock.c"
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


@dataclass(frozen=True)
class ClockedServer:
    server: RedisServer
    file: Path
    library: Path

    @property
    def url(self) -> str:
        return self.server.url

    def start(self) -> None:
        """Also restarts it after a kill, at the time that was set last."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("LD_PRELOAD", str(self.library))
            patch.setenv("CLOCK_FILE", str(self.file))
            self.server.start()

    def set(self, offset_s: int) -> None:
        """Set the clock this many seconds ahead of the machine's clock; it keeps running."""
        self._write(offset_s, 0, lambda now: abs(now - time.time() - offset_s) <= 2)

    def stop_at(self, unix_s: int) -> None:
        """Stop the clock at that time until another is set: the test does not depend on durations."""
        self._write(0, unix_s, lambda now: now == unix_s)

    def _write(self, offset_s: int, stopped_at: int, is_seen: Callable[[int], bool]) -> None:
        """Scripts use the time that the server has read last, often before the command arrived."""
        with self.file.open("r+b") as file:
            file.write(struct.pack("=qq", offset_s, stopped_at))
        give_up = time.monotonic() + 60
        with redis.Redis.from_url(self.url, socket_timeout=30, retry=None) as client:
            while not is_seen(int(client.eval("return redis.call('TIME')[1]", 0))):
                assert time.monotonic() < give_up, "the server does not see its new time"


@contextmanager
def clocked_server(
    directory: Path, binary: str = "valkey-server", options: tuple[str, ...] = ()
) -> Iterator[ClockedServer]:
    """Skips the test if there is no C compiler."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        library = build_library(directory)
    except FileNotFoundError as error:
        pytest.skip(str(error))
    file = directory / "clock"
    file.write_bytes(bytes(16))
    clocked = ClockedServer(RedisServer(server_binary(binary), directory / binary, options), file, library)
    clocked.start()
    try:
        yield clocked
    finally:
        clocked.server.kill()
