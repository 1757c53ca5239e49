"""Two small drivers that run `Call`s: one over redis.Redis, one over redis.asyncio.Redis.

Scripts are sent with EVALSHA. If a server does not know one (NOSCRIPT: new, restarted, failed over), all scripts are
loaded and the call is repeated. Only this module converts the driver library's errors to Pagemill's. clients.py finds
the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import traceback
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import redis
import redis.asyncio
from redis import exceptions

from pagemill.producer.wire.process.interruption import Interrupted, interruption
from pagemill.producer.wire.schema.errors import (
    AccessDenied,
    InvalidAddress,
    PagemillError,
    QueueFull,
    RedisRefused,
    RedisUnavailable,
)
from pagemill.producer.wire.server import durability, scripts
from pagemill.producer.wire.server.scripts import Call

T = TypeVar("T")

_PIPELINE_CALLS = 500
_SCRIPT_TRIES = 5
"""Attempts to send a call to a server that repeatedly loses its scripts, by a restart or a flush."""
_NO_PERMISSION = ("NOPERM", "ACL failure in script", "The user executing the script can't", "DENIED ")
"""Messages of a denied permission; servers differ in those from inside scripts."""
_NO_SUCH_DATABASE = ("DB index", "Invalid Database", "SELECT is not allowed")
_NOT_NOW = (
    "READONLY",
    "LOADING",
    "MASTERDOWN",
    "CLUSTERDOWN",
    "MISCONF",
    "BUSY",
    "TRYAGAIN",
    "NOREPLICAS",
    "MOVED",
    "ASK ",
    "UNBLOCKED",
)
_NOT_NOW_ERRORS = (
    exceptions.NoScriptError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.AskError,
    exceptions.TryAgainError,
)
"""If an error has a class, the driver strips the code from its message."""


@contextlib.contextmanager
def wrap_errors() -> Iterator[None]:
    """Convert the driver library's errors to Pagemill's."""
    try:
        yield
    except (exceptions.RedisError, OSError, Interrupted) as error:
        _raise_interruption(error)
        raise _translated(error) from error


@contextlib.contextmanager
def _reading() -> Iterator[None]:
    """Convert the driver's errors to Pagemill's. Exceptions of others, such as a signal handler's, pass unchanged."""
    try:
        yield
    except Exception as error:
        _raise_interruption(error)
        if (ours := _ours(error)) is error:
            raise
        raise ours from error


def _raise_interruption(error: BaseException) -> None:
    """Raise a signal handler's exception if it is the cause of this error."""
    if (raised := interruption(error)) is not None:
        raise raised


def _ours(error: Exception) -> Exception:
    """Return Pagemill's error for one of the driver's, which is its cause; others unchanged."""
    if isinstance(error, exceptions.RedisError | OSError):
        ours = _translated(error)
    elif _is_of_parser(error):
        ours = _foreign(error)
    else:
        return error
    ours.__cause__ = error
    return ours


def _is_of_parser(error: Exception) -> bool:
    """Return whether the driver's parser failed at a reply: with a built-in error, in the parser's own code.

    A signal handler that raises during a read has the innermost frame, and usually its own exception class.
    """
    if type(error).__module__.partition(".")[0] not in ("builtins", "asyncio", "hiredis"):
        return False
    modules = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(modules) and modules[-1].partition(".")[0] in ("redis", "hiredis", "asyncio")


def _foreign(error: Exception) -> RedisUnavailable:
    return RedisUnavailable(
        f"the server does not speak the Redis protocol: {type(error).__name__}, {str(error)[:160]!a}"
    )


def _translated(error: Exception) -> PagemillError:
    message = str(error).rstrip(".")
    # Redis 6.2 wraps a script's error in another message, so the code is searched for anywhere.
    if isinstance(error, exceptions.OutOfMemoryError) or "OOM command not allowed" in message:
        return QueueFull("the Redis server has reached its maxmemory", reason="memory")
    if any(word in message for word in _NO_SUCH_DATABASE):
        return InvalidAddress(
            f"the server has no such database, correct the number in its address: {message}"
        )
    if isinstance(error, exceptions.NoPermissionError) or any(word in message for word in _NO_PERMISSION):
        return AccessDenied(f"Redis denies this user a permission (docs/security.md lists them): {message}")
    if isinstance(error, exceptions.AuthenticationError):
        return RedisUnavailable(f"Redis rejects the user or the password: {message}")
    if isinstance(error, exceptions.ConnectionError | exceptions.TimeoutError | OSError):
        return RedisUnavailable(f"Redis does not answer: {message}")
    if isinstance(error, exceptions.InvalidResponse):
        return _foreign(error)
    if isinstance(error, _NOT_NOW_ERRORS) or any(word in message[:160] for word in _NOT_NOW):
        return RedisUnavailable(f"Redis rejects calls now: {message}")
    return RedisRefused(f"Redis rejects a valid call: {message}")


class SyncTransport:
    """Runs calls over a `redis.Redis` (decode_responses off). Thread-safe, as the client is."""

    def __init__(self, client: redis.Redis) -> None:
        self.client = client

    def run(self, call: Call[T]) -> T:
        """Run one call. Raises RedisUnavailable, AccessDenied, QueueFull (out of memory), InvalidAddress (no such
        database) or RedisRefused."""
        with _reading():
            reply = self._run(call)
        return call.parse(reply)

    def _run(self, call: Call[Any]) -> Any:
        for _ in range(_SCRIPT_TRIES):
            try:
                return self.client.evalsha(*_evalsha(call))
            except exceptions.NoScriptError as error:
                unknown = error
                self._load_scripts()
        raise unknown

    def begin(self, call: Call[T]) -> Pending[T]:
        """Send a call and return immediately, so that the caller can work meanwhile."""
        return Pending(self, call)

    def run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """Run calls in one round trip; each is atomic, but not all together. Raises the first error at the end."""
        return _without_errors(self.run_each(calls))

    def run_each(self, calls: Sequence[Call[T]]) -> list[T | PagemillError]:
        """Like `run_many`; a call that the server rejects yields its error. Raises RedisUnavailable."""
        replies: list[Any] = []
        with _reading():
            for start in range(0, len(calls), _PIPELINE_CALLS):
                replies += self._pipeline(calls[start : start + _PIPELINE_CALLS])
        found = list(map(_parsed, calls, replies))
        for reply in found:
            if isinstance(reply, RedisUnavailable):
                raise reply
        return found

    def _pipeline(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return a reply or an exception for each call."""
        packs = scripts.packed(calls)
        replies: list[Any] = []
        for pack, reply in zip(packs, self._replies([scripts.joined(pack) for pack in packs]), strict=True):
            done = _shared(pack, reply)
            replies += done + (self._replies(pack[len(done) :]) if len(done) < len(pack) else [])
        return replies

    def _replies(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return a reply or an exception for each call, each of which runs its own script."""
        replies = self._send(calls)
        for _ in range(_SCRIPT_TRIES - 1):
            unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
            if not unknown:
                break
            self._load_scripts()
            for i, reply in zip(unknown, self._send([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return replies

    def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(*_evalsha(call))
            return list(pipeline.execute(raise_on_error=False))

    def sync(self, queue: str) -> None:
        """See durability.sync."""
        with wrap_errors():
            durability.sync(self.client, queue)

    def _load_scripts(self) -> None:
        # All scripts together: if a server knew only some, a pipeline's calls would be reordered.
        with self.client.pipeline(transaction=False) as pipeline:
            for name in scripts.names():
                pipeline.script_load(scripts.source(name))
            pipeline.execute()

    def close(self) -> None:
        self.client.close()


class Pending(Generic[T]):
    """A call that was sent, on a separate connection. `finish` or `abandon` it; both are final."""

    def __init__(self, transport: SyncTransport, call: Call[T]) -> None:
        self._transport = transport
        self._call = call
        self._pool = transport.client.connection_pool
        self._connection: Any = None
        try:
            self._connection = self._pool.get_connection()
            self._connection.send_command("EVALSHA", *_evalsha(call))
        except (exceptions.RedisError, OSError):
            pass  # `finish` sends it again, and raises the error
        except BaseException as error:
            self.abandon()
            _raise_interruption(error)
            raise

    def finish(self) -> T:
        """Return the parsed reply. After any error the call is sent again, which is idempotent."""
        connection, self._connection = self._connection, None
        if connection is None:
            return self._transport.run(self._call)
        try:
            reply = connection.read_response()
        except exceptions.NoScriptError:
            return self._transport.run(self._call)
        except exceptions.ResponseError as error:
            raise _translated(error) from error
        except BaseException as error:
            connection.disconnect()
            _raise_interruption(error)
            if not isinstance(error, exceptions.RedisError | OSError) and not (
                isinstance(error, Exception) and _is_of_parser(error)
            ):
                raise
            return self._transport.run(self._call)
        finally:
            self._pool.release(connection)
        return self._call.parse(reply)

    def abandon(self) -> None:
        """Discard the reply. No effect after `finish`."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.disconnect()
            self._pool.release(connection)


class AsyncTransport:
    """Runs calls over a `redis.asyncio.Redis` (decode_responses off)."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self.client = client
        self._waiting: list[tuple[Call[Any], asyncio.Future[Any]]] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        """The event loop that will send the waiting calls."""
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self, call: Call[T]) -> T:
        """Like SyncTransport.run. Calls made while the event loop handles the same events are sent together."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            self._waiting, self._loop = [], loop  # no caller waits on a loop that has ended
            loop.call_soon(self._send_waiting)
        answered: asyncio.Future[Any] = loop.create_future()
        self._waiting.append((call, answered))
        return call.parse(await answered)

    async def run_alone(self, call: Call[T]) -> T:
        """Like `run`, but sent immediately."""
        with _reading():
            reply = await self._run(call)
        return call.parse(reply)

    def _send_waiting(self) -> None:
        waiting, self._waiting, self._loop = self._waiting, [], None
        for start in range(0, len(waiting), _PIPELINE_CALLS):
            task = asyncio.create_task(self._answer(waiting[start : start + _PIPELINE_CALLS]))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _answer(self, waiting: list[tuple[Call[Any], asyncio.Future[Any]]]) -> None:
        calls = [call for call, _ in waiting]
        replies: list[Any]
        try:
            replies = [await self._run(calls[0])] if len(calls) == 1 else await self._pipeline(calls)
        except Exception as error:
            replies = [error] * len(calls)
        except asyncio.CancelledError:  # the event loop is closing
            for _, future in waiting:
                future.cancel()
            raise
        for (_, future), reply in zip(waiting, replies, strict=True):
            if future.done():
                continue
            if isinstance(reply, Exception):
                future.set_exception(_ours(reply))
            else:
                future.set_result(reply)

    async def _run(self, call: Call[Any]) -> Any:
        for _ in range(_SCRIPT_TRIES):
            try:
                return await self.client.evalsha(*_evalsha(call))
            except exceptions.NoScriptError as error:
                unknown = error
                await self._load_scripts()
        raise unknown

    async def run_many(self, calls: Sequence[Call[T]]) -> list[T]:
        """Like SyncTransport.run_many."""
        replies: list[Any] = []
        with _reading():
            for start in range(0, len(calls), _PIPELINE_CALLS):
                replies += await self._pipeline(calls[start : start + _PIPELINE_CALLS])
        return _without_errors(list(map(_parsed, calls, replies)))

    async def _pipeline(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return a reply or an exception for each call."""
        packs = scripts.packed(calls)
        found = await self._replies([scripts.joined(pack) for pack in packs])
        replies: list[Any] = []
        for pack, reply in zip(packs, found, strict=True):
            done = _shared(pack, reply)
            replies += done + (await self._replies(pack[len(done) :]) if len(done) < len(pack) else [])
        return replies

    async def _replies(self, calls: Sequence[Call[Any]]) -> list[Any]:
        """Return a reply or an exception for each call, each of which runs its own script."""
        replies = await self._send(calls)
        for _ in range(_SCRIPT_TRIES - 1):
            unknown = [i for i, reply in enumerate(replies) if isinstance(reply, exceptions.NoScriptError)]
            if not unknown:
                break
            await self._load_scripts()
            for i, reply in zip(unknown, await self._send([calls[i] for i in unknown]), strict=True):
                replies[i] = reply
        return replies

    async def _send(self, calls: Sequence[Call[T]]) -> list[Any]:
        async with self.client.pipeline(transaction=False) as pipeline:
            for call in calls:
                pipeline.evalsha(*_evalsha(call))
            return list(await pipeline.execute(raise_on_error=False))

    async def sync(self, queue: str) -> None:
        """See durability.sync."""
        with wrap_errors():
            await durability.sync_async(self.client, queue)

    async def _load_scripts(self) -> None:
        async with self.client.pipeline(transaction=False) as pipeline:
            for name in scripts.names():
                pipeline.script_load(scripts.source(name))
            await pipeline.execute()

    async def close(self) -> None:
        await self.client.aclose()


def _evalsha(call: Call[Any]) -> tuple[Any, ...]:
    return (scripts.sha1(call.script), len(call.keys), *call.keys, *call.args)


def _shared(pack: Sequence[Call[Any]], reply: Any) -> list[Any]:
    """Return the replies to the first calls of a pack; the others must be sent separately."""
    if len(pack) == 1:
        return [reply]
    return [[one] for one in reply] if isinstance(reply, list) and len(reply) <= len(pack) else []


def _parsed(call: Call[T], reply: Any) -> T | PagemillError:
    """Return the parsed reply, or Pagemill's error for the driver's in its place."""
    if not isinstance(reply, Exception):
        return call.parse(reply)
    ours = _ours(reply)
    if not isinstance(ours, PagemillError):
        raise ours
    return ours


def _without_errors(replies: list[T | PagemillError]) -> list[T]:
    found: list[T] = []
    for reply in replies:
        if isinstance(reply, PagemillError):
            raise reply
        found.append(reply)
    return found
