"""`memory://NAME`: a queue's server inside this process, for tests of services.

fakeredis, from the extra `testing`, replaces the server and runs the queue's scripts. All clients of a name share it,
from any thread or event loop, and other processes cannot access it.
"""

from __future__ import annotations

import re
import threading
from typing import Any

import redis
import redis.asyncio

from pagemill.producer.wire.schema.errors import InvalidAddress

SCHEME = "memory://"
_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_INFO = {"redis_version": "7.2.0", "aof_enabled": 1, "maxmemory_policy": "noeviction"}
_servers: dict[str, Any] = {}
_lock = threading.Lock()


def check_memory_url(url: str) -> None:
    """Raise InvalidAddress for an invalid name."""
    if not _NAME.fullmatch(url.removeprefix(SCHEME)):
        raise InvalidAddress("after memory:// comes a name, of A-Z a-z 0-9 . _ -")


def memory_client(url: str) -> redis.Redis:
    """Return a client of the in-memory server. Raises InvalidAddress if fakeredis is not installed."""
    client: redis.Redis = _library().FakeRedis(server=_server(url))
    client.info = lambda *_: dict(_INFO)  # fakeredis does not support it
    return client


def memory_async_client(url: str) -> redis.asyncio.Redis:
    """Like `memory_client`, for asyncio."""
    client: redis.asyncio.Redis = _library().FakeAsyncRedis(server=_server(url))
    return client


def forget(url: str) -> None:
    """Drop the server and its data; the next client of the name finds an empty one."""
    with _lock:
        _servers.pop(url, None)


def _server(url: str) -> Any:
    with _lock:
        if url not in _servers:
            _servers[url] = _library().FakeServer(server_type="redis")
        return _servers[url]


def _library() -> Any:
    try:
        import fakeredis
        import lupa  # noqa: F401  # what fakeredis runs scripts with
    except ModuleNotFoundError as error:
        raise InvalidAddress(f"memory:// needs {error.name}: pip install 'pagemill[testing]'") from None
    return fakeredis
