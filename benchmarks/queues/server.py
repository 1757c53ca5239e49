"""A dedicated Redis server of a benchmark: append-only file enabled, written once per second, no other load."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import redis

from tests.conftest import RedisServer, server_binary

BINARIES = {"valkey": "valkey-server", "redis62": "redis-server"}
"""Kinds from packages of the dev extra."""
SYSTEM_KIND = "redis7"
"""The operating system's redis-server, if it is a Redis 7: Debian 12 has 7.0."""
PATIENCE_S = 120.0


def kinds() -> list[str]:
    """Return every kind of server on this machine."""
    return [*BINARIES, *([SYSTEM_KIND] if _system_server() is not None else [])]


@contextlib.contextmanager
def start_server(kind: str, directory: Path, *options: str) -> Iterator[str]:
    """Yield the URL of a server that stops at the end of the block. `kind`: one of `kinds()`."""
    binary = _system_server() if kind == SYSTEM_KIND else server_binary(BINARIES[kind])
    if binary is None:
        raise FileNotFoundError("the redis-server of this machine is no Redis 7, or there is none")
    server = RedisServer(binary, directory / kind, options)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()


def used_memory(client: redis.Redis) -> int:
    """Return the size of the data in bytes, once the server is idle.

    At that time no memory is being freed, no rewrite of the append-only file occupies memory, and no writes
    wait in memory for a busy disk. Buffers of open connections count; close those that sent much data.
    """
    give_up = time.monotonic() + PATIENCE_S
    while time.monotonic() < give_up:
        info = client.info()  # one reply, one moment
        rewriting = info["aof_rewrite_in_progress"] or info["aof_rewrite_scheduled"]
        unwritten = info.get("aof_buffer_length", 0)
        if not rewriting and not unwritten and not info["lazyfree_pending_objects"]:
            return int(info["used_memory"])
        time.sleep(0.05)
    raise TimeoutError("the server does not come to rest")


def _system_server() -> Path | None:
    found = shutil.which("redis-server")
    if found is None:
        return None
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    return Path(found) if "v=7." in version else None
