"""Two small drivers that run `Call`s: one over redis.Redis, one over redis.asyncio.Redis.

Scripts go by EVALSHA. A server that does not know one (NOSCRIPT: new, restarted, failed over) is taught all
of them and asked again. The driver library's errors become ours here and nowhere else. What server that is,
clients.py knows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis import exceptions

from pagemill.producer.wire.schema.errors import AccessDenied, QueueFull, RedisUnavailable
from pagemill.producer.wire.server import durability, scripts
from pagemill.producer.wire.server.scripts import Call

T = TypeVar("T")

_PIPELINE_CALLS = 500
_NO_PERMISSION = ("NOPERM", "ACL failure in script", "The user executing the script can't")
"""How servers say it; inside scripts each in its own way."""


@contextlib.contextmanager
def wrap_errors() -> Iterator[None]:
    """Turn the driver library's errors into ours."""
    try:
        yield
    except (exceptions.ConnectionError, exceptions.TimeoutError, OSError) as error:
        raise RedisUnavailable(f"Redis does not answer: {str(error).rstrip('.')}") from error
    except exceptions.ResponseError as error:
        raise _response_error(error) from error


def _response_error(error: Exception) -> Exception:
    message = str(error)
    # Redis 6.2 wraps a script's error in a sentence of its own, so the word is looked for anywhere.
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in message:
        return QueueFull("the Redis server has reached its maxmemory")
    if isinstance(error, exceptions.NoPermissionError) or any(word in message for word in _NO_PERMISSION):
        return AccessDenied(f"Redis refuses this user (docs/security.md lists what it needs): {message}")
    unavailable = (
        "READONLY",
        "LOADING",
        "MASTERDOWN",
        "CLUSTERDOWN",
        "MISCONF",
        "BUSY",
        "TRYAGAIN",
        "NOREPLICAS",
    )
    if isinstance(error, exceptions.ReadOnlyError) or any(word in message[:160] for word in unavailable):
        return RedisUnavailable(f"Redis refuses writes now: {message}")
    return error


class SyncTransport:
    """Runs calls over a `redis.Redis` (decode_responses off). Thread-safe, as the client is."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run(self, call: Call[T]) -> T:
        """Run one call. Raises RedisUnavailable, QueueFull (out of memory), or redis' ResponseError."""
        with wrap_errors():
            try:
                reply = self.client.evalsha(*_evalsha(call))
            except exceptions.NoScriptError:
                self._teach()
                reply = self.client.evalsha(*_evalsha(call))
        return call.parse(reply)

    def begin(self, call: Call[T]) -> Pending[T]:
        """Send a call and return at once, so that the caller can work while the server does."""
        return Pending(self, call)

    def run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run calls in one round trip, each atomic, together not. Raises the first error, after all ran."""
        replies: list[Any] = []
        with wrap_errors():
            for start in range(0, len(calls), _PIPELINE_CALLS):
                replies += self._pipeline(calls[start : start + _PIPELINE_CALLS])
        return [call.parse(reply) for call, reply in zip(calls, replies, strict=True)]

    def _pipeline(self, calls: Sequence[Call[T]]) -> list[Any]:
        replies = self._send(calls)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            self._teach()
            for i, reply in zip(unknown, self._send([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return _without_errors(replies)

    def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(*_evalsha(call))
            return list(pipeline.execute(raise_on_error=False))

    def sync(self, queue: str) -> None:
        """See durability.sync."""
        with wrap_errors():
            durability.sync(self.client, queue)

    def _teach(self) -> None:
        # All at once: with one known and another not, a pipeline's calls would be reordered.
        for name in scripts.names():
            self.client.script_load(scripts.source(name))

    def close(self) -> None:
        self.client.close()


class Pending(Generic[T]):
    """A call that was sent, on a connection of its own. `finish` or `abandon` it; both are final."""

    def __init__(self, transport: SyncTransport, call: Call[T]) -> None:
        self._transport = transport
        self._call = call
        self._pool = transport.client.connection_pool
        self._connection: Any = None
        with contextlib.suppress(exceptions.ConnectionError, exceptions.TimeoutError, OSError):
            self._connection = self._pool.get_connection()
            self._connection.send_command("EVALSHA", *_evalsha(call))

    def finish(self) -> T:
        """The parsed reply. Whatever went wrong on the way, the call is sent again: that does no harm."""
        connection, self._connection = self._connection, None
        if connection is None:
            return self._transport.run(self._call)
        try:
            reply = connection.read_response()
        except (exceptions.ConnectionError, exceptions.TimeoutError, OSError):
            connection.disconnect()
            return self._transport.run(self._call)
        except exceptions.NoScriptError:
            return self._transport.run(self._call)
        except exceptions.ResponseError as error:
            raise _response_error(error) from error
        finally:
            self._pool.release(connection)
        return self._call.parse(reply)

    def abandon(self) -> None:
        """Give up on the reply. After `finish` it does nothing."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)


class AsyncTransport:
    """Runs calls over a `redis.asyncio.Redis` (decode_responses off)."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client

    async def run(self, call: Call[T]) -> T:
        """As SyncTransport.run."""
        with wrap_errors():
            try:
                reply = await self.client.evalsha(*_evalsha(call))
            except exceptions.NoScriptError:
                await self._teach()
                reply = await self.client.evalsha(*_evalsha(call))
        return call.parse(reply)

    async def run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """As SyncTransport.run_many."""
        replies: list[Any] = []
        with wrap_errors():
            for start in range(0, len(calls), _PIPELINE_CALLS):
                replies += await self._pipeline(calls[start : start + _PIPELINE_CALLS])
        return [call.parse(reply) for call, reply in zip(calls, replies, strict=True)]

    async def _pipeline(self, calls: Sequence[Call[T]]) -> list[Any]:
        replies = await self._send(calls)
        unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
        if unknown:
            await self._teach()
            for i, reply in zip(unknown, await self._send([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return _without_errors(replies)

    async def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(*_evalsha(call))
            return list(await pipeline.execute(raise_on_error=False))

    async def sync(self, queue: str) -> None:
        """See durability.sync."""
        with wrap_errors():
            await durability.sync_async(self.client, queue)

    async def _teach(self) -> None:
        for name in scripts.names():
            await self.client.script_load(scripts.source(name))

    async def close(self) -> None:
        await self.client.aclose()


def _evalsha(call: Call[Any]) -> tuple[Any, ...]:
    return (scripts.sha1(call.script), len(call.keys), *call.keys, *call.args)


def _without_errors(replies: list[Any]) -> list[Any]:
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
