"""`durability="fsync"`: `submit` returns only after the server's append-only file has the job on disk.

WAITAOF (Redis 7.2, Valkey 7.2) waits until everything this connection wrote is on disk. It has no effect inside a
script, or on a connection without writes. So `sync` first writes a small key on the same connection: the file is
sequential, so all earlier writes to the server are then on disk too.
"""

from __future__ import annotations

from typing import Any, Literal

import redis
import redis.asyncio
from redis import exceptions

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob, RedisUnavailable

Durability = Literal["server", "fsync"]
"""server: according to the server's `appendfsync`."""

SYNC_TIMEOUT_MS = 4000
"""Under `appendfsync everysec` a sync takes up to 1 s, or 2 s on a slow disk. Below every socket timeout."""
MARKER_TTL_MS = 86_400_000


def sync_commands(queue: str) -> tuple[tuple[Any, ...], ...]:
    """Return the commands of one pipeline: a write, without which there is nothing to wait for, and the wait."""
    marker = keys.synced(queue)
    return (
        # PEXPIRE works even at maxmemory, when SET is rejected; SET is for when there is no marker yet.
        ("PEXPIRE", marker, MARKER_TTL_MS),
        ("SET", marker, "1", "PX", MARKER_TTL_MS),
        ("WAITAOF", 1, 0, SYNC_TIMEOUT_MS),
    )


def sync(client: redis.Redis, queue: str) -> None:
    """Wait until all earlier writes to the server are on its disk.

    Raises RedisUnavailable if that is unknown (call it again), InvalidJob if the server does not support it.
    """
    with client.pipeline(transaction=False) as pipeline:
        for command in sync_commands(queue):
            pipeline.execute_command(*command)
        replies = pipeline.execute(raise_on_error=False)
    if not _is_on_disk(replies):
        try:
            setting = client.config_get("append*")
        except exceptions.ResponseError:
            setting = {}  # managed servers may hide it
        _check_setting(setting, replies[-1])


async def sync_async(client: redis.asyncio.Redis, queue: str) -> None:
    """Like `sync`."""
    async with client.pipeline(transaction=False) as pipeline:
        for command in sync_commands(queue):
            pipeline.execute_command(*command)
        replies = await pipeline.execute(raise_on_error=False)
    if not _is_on_disk(replies):
        try:
            setting = await client.config_get("append*")
        except exceptions.ResponseError:
            setting = {}
        _check_setting(setting, replies[-1])


def _is_on_disk(replies: list[Any]) -> bool:
    """Return whether the writes are on disk; False if the server has no WAITAOF, or no append-only file."""
    touched, written, waited = replies
    if isinstance(waited, exceptions.ResponseError):
        return False
    if isinstance(waited, Exception):
        raise waited
    if touched != 1 and isinstance(written, Exception):
        raise RedisUnavailable(f"nothing can be written to wait for: {written}")
    if int(waited[0]) < 1:
        raise RedisUnavailable(
            f"the append-only file was not on disk within {SYNC_TIMEOUT_MS / 1000:g} s; the outcome is unknown"
        )
    return True


def _check_setting(setting: dict[Any, Any], refusal: Any) -> None:
    """Accept a server without WAITAOF only if it syncs before every reply. Raises InvalidJob otherwise."""
    values = {_text(name): _text(value) for name, value in setting.items()}
    if (values.get("appendonly"), values.get("appendfsync")) != ("yes", "always"):
        raise InvalidJob(
            f'durability="fsync" needs WAITAOF (Redis 7.2 or Valkey 7.2, appendonly yes) or appendfsync '
            f"always: {refusal}",
            "unsupported_feature",
        )


def _text(value: bytes | str) -> str:
    return value.decode() if isinstance(value, bytes) else value
