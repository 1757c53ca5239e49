"""A Redis server of a benchmark's own: append-only file on, written once a second, nothing else on it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from tests.conftest import RedisServer, server_binary

BINARIES = {"valkey": "valkey-server", "redis62": "redis-server"}


@contextlib.contextmanager
def start_server(kind: str, directory: Path, *options: str) -> Iterator[str]:
    """The URL of a server that ends with the block. `kind`: valkey or redis62."""
    server = RedisServer(server_binary(BINARIES[kind]), directory / kind, options)
    server.start()
    try:
        yield server.url
    finally:
        server.stop()
