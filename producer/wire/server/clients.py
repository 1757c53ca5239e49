"""Clients for a queue's server, from an address: one server, Sentinel, or Cluster; with or without TLS.

    redis://user:password@host:6379/0            one server; rediss:// with TLS; unix:///path
    redis+sentinel://host1,host2:26380/service   the master of a service; rediss+sentinel:// with TLS
    redis+cluster://host1:7000,host2:7000        the owner of the queue's slot; rediss+cluster:// with TLS
    memory://name                                none: this process holds the queue, for tests

`valkey` is accepted in place of `redis`.

The query accepts options of the driver (timeouts, `ssl_ca_certs`, `ssl_certfile`, `ssl_keyfile`, ...), for Sentinel
also `sentinel_username` and `sentinel_password`.
"""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit

import redis
import redis.asyncio
from pydantic import AfterValidator
from redis import connection, exceptions
from redis.asyncio import connection as async_connection

from pagemill.producer.wire.process.interruption import carrying_interruptions
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidAddress
from pagemill.producer.wire.server.locators import Address, ClusterLocator, Locator, SentinelLocator
from pagemill.producer.wire.server.memory import SCHEME, check_memory_url, memory_async_client, memory_client

CONNECTION_OPTIONS: dict[str, Any] = {
    "socket_timeout": 15.0,
    "socket_connect_timeout": 5.0,
    "socket_keepalive": True,
    "health_check_interval": 30,
}
"""Options of all clients. A blocking command must return before `socket_timeout`."""

_SCHEME = re.compile(r"(rediss?)\+(sentinel|cluster)")
_VALKEY = re.compile(r"valkey(s?)(?=(\+\w+)?://)")
_DEFAULT_PORTS = {"sentinel": 26379, "cluster": 6379}
_LONGEST_S = 86_400.0
_URL_OPTIONS = frozenset(
    {
        "db", "username", "password", "client_name", "protocol", "socket_timeout", "socket_connect_timeout",
        "socket_keepalive", "socket_read_size", "health_check_interval", "ssl_keyfile", "ssl_certfile",
        "ssl_cert_reqs", "ssl_ca_certs", "ssl_ca_data", "ssl_ca_path", "ssl_password", "ssl_check_hostname",
        "ssl_min_version", "ssl_ciphers", "ssl_include_verify_flags", "ssl_exclude_verify_flags",
    }
)  # fmt: skip
"""Options that a URL may set: those of the driver for both threads and asyncio."""
_IGNORED_OPTIONS = frozenset(
    {
        "decode_responses", "encoding", "encoding_errors", "legacy_responses", "max_connections", "timeout",
        "retry_on_timeout", "retry_on_error",
    }
)  # fmt: skip
"""Options for other programs in a shared URL, fixed here: replies are bytes, and Pagemill has its own pools."""
_FILES = ("ssl_ca_certs", "ssl_ca_path", "ssl_certfile", "ssl_keyfile")
_SENTINEL_OPTIONS = {"sentinel_username": "username", "sentinel_password": "password"}


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """A parsed URL: `url` is for the driver; `nodes` are Sentinels or Cluster nodes to query first, if any."""

    url: str
    kind: str
    nodes: tuple[Address, ...] = ()
    service: str = ""
    sentinel_options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, url: str) -> ServerAddress:
        """Parse a URL. Raises InvalidAddress, whose message never contains the URL, which may have a password."""
        url = _VALKEY.sub(r"redis\1", url, count=1) if url.startswith("valkey") else url
        scheme, separator, rest = url.partition("://")
        match = _SCHEME.fullmatch(scheme)
        if url.startswith(SCHEME):
            check_memory_url(url)
            return cls(url, "memory")
        base_url, _, query = url.partition("?")
        given = dict(parse_qsl(query))
        options = {name: value for name, value in given.items() if name not in _IGNORED_OPTIONS}
        if match is None or not separator:
            if len(options) < len(given):
                url = base_url + (f"?{urlencode(options)}" if options else "")
            _check(url)
            return cls(url, "server")
        base, kind = match.groups()
        parts = _split(f"{base}://{rest.partition('?')[0]}")
        credentials, at, hosts = parts.netloc.rpartition("@")
        nodes = tuple(_node(host, _DEFAULT_PORTS[kind]) for host in hosts.split(",") if host)
        if not nodes:
            raise InvalidAddress(f"a {scheme} URL names at least one host")
        service, _, database = parts.path.strip("/").partition("/")
        if kind == "sentinel" and not service:
            raise InvalidAddress(f"a {scheme} URL ends in the service's name: {scheme}://host:26379/mymaster")
        if kind == "cluster" and (service or "0") != "0":
            raise InvalidAddress("a Cluster has one database, 0")
        asked = tuple(
            (_SENTINEL_OPTIONS[n], options.pop(n)) for n in tuple(options) if n in _SENTINEL_OPTIONS
        )
        host = f"[{nodes[0][0]}]" if ":" in nodes[0][0] else nodes[0][0]
        plain = f"{base}://{credentials}{at}{host}:{nodes[0][1]}/{database or 0}"
        plain += f"?{urlencode(options)}" if options else ""
        _check(plain)
        return cls(plain, kind, nodes, service if kind == "sentinel" else "", asked)

    def locator(self, queue: str) -> Locator | None:
        """Return the locator of the queue's server; None for a single server."""
        if self.kind in ("server", "memory"):
            return None
        options = connection.parse_url(self.url)
        options["ssl"] = options.pop("connection_class", None) is connection.SSLConnection
        for name in ("host", "port", "db"):
            options.pop(name, None)
        if self.kind == "cluster":
            return ClusterLocator(self.nodes, keys.prefix(queue), options)
        for name in ("username", "password"):  # the server's, not the Sentinels'
            options.pop(name, None)
        return SentinelLocator(self.nodes, self.service, options | dict(self.sentinel_options))


def _address(url: str) -> str:
    ServerAddress.parse(url)
    return url


RedisAddress = Annotated[str, AfterValidator(_address)]
"""A setting that names a server."""


def open_client(url: str, queue: str, **options: Any) -> redis.Redis:
    """Return a client (decode_responses off) for `queue`'s current server.

    `options` override the URL's and `CONNECTION_OPTIONS`. Connects on first use. Raises InvalidAddress for an invalid
    URL.
    """
    address = ServerAddress.parse(url)
    if address.kind == "memory":
        return memory_client(url)
    parsed = connection.parse_url(address.url)
    given = connection_options(url) | parsed | options
    kind = parsed.get("connection_class", connection.Connection)
    if (locator := address.locator(queue)) is not None:
        given |= {"connection_class": _of_kind(_Locating, kind), "locator": locator}
    else:
        given["connection_class"] = _of_kind(_Leaving, kind)
    return redis.Redis.from_pool(connection.ConnectionPool(**given))


def open_masters(url: str) -> list[redis.Redis]:
    """Return a client for every server that may hold queues: each master of a Cluster, or the one server.

    A Cluster is queried immediately: raises redis' ConnectionError if no node answers, otherwise as `open_client`.
    """
    address = ServerAddress.parse(url)
    locator = address.locator("default")
    if not isinstance(locator, ClusterLocator):
        return [open_client(url, "default")]
    given = connection_options(url) | connection.parse_url(address.url)
    pools = (
        connection.ConnectionPool(**given | {"host": host, "port": port}) for host, port in locator.masters()
    )
    return [redis.Redis.from_pool(pool) for pool in pools]


def open_async_client(url: str, queue: str, *, max_connections: int, **options: Any) -> redis.asyncio.Redis:
    """Like `open_client`, for asyncio. With all `max_connections` in use, callers wait."""
    address = ServerAddress.parse(url)
    if address.kind == "memory":
        return memory_async_client(url)
    parsed = async_connection.parse_url(address.url)
    given = connection_options(url) | dict(parsed) | options
    kind = parsed.get("connection_class", async_connection.Connection)
    if (locator := address.locator(queue)) is not None:
        given |= {"connection_class": _of_kind(_AsyncLocating, kind), "locator": locator}
    else:
        given["connection_class"] = _of_kind(_AsyncLeaving, kind)
    pool = _AsyncPool(max_connections=max_connections, timeout=None, **given)
    return redis.asyncio.Redis.from_pool(pool)


def connection_options(url: str) -> dict[str, Any]:
    """Return the `CONNECTION_OPTIONS` for `url`: the driver does not support keepalive for a unix socket."""
    is_unix = url.startswith("unix:")
    return {
        name: value
        for name, value in CONNECTION_OPTIONS.items()
        if not (is_unix and name == "socket_keepalive")
    }


def redacted(url: str) -> str:
    """Return the URL without its passwords, for logs."""
    shown = re.sub(r"(?<=://)([^/@]*):[^/]*@(?=[^@]*$)", r"\1:***@", url)
    return re.sub(r"(?i)([?&][^=&]*password=)[^&]*", r"\1***", shown)


def has_password(url: str) -> bool:
    return redacted(url) != url


@contextmanager
def _noticing_moves() -> Iterator[None]:
    """Turn a redirection into a lost connection, so that the next connection locates the server again.

    ASK counts too. Following it would send a script to a server that has only part of the queue's keys;
    waiting until the whole slot has moved is the only safe answer.
    """
    try:
        yield
    except exceptions.ResponseError as error:
        is_stale = isinstance(error, exceptions.ReadOnlyError | exceptions.AskError)
        if not is_stale and not str(error).startswith(("MOVED ", "ASK ")):
            raise
        raise exceptions.ConnectionError(
            f"the queue is not (wholly) on this server any more: {error}"
        ) from error


def _is_demoted(error: exceptions.ResponseError) -> bool:
    """Return whether the server is now a replica: its address may lead to a new primary."""
    return isinstance(error, exceptions.ReadOnlyError | exceptions.MasterDownError) or "UNBLOCKED" in str(
        error
    )


class _OneHandshake:
    """A mixin of the driver's connections that limits the attempts to reach a silent server to the driver's retries.

    The driver pings inside the handshake, with separate retries, so that the attempts would multiply.
    """

    def on_connect_check_health(self, check_health: bool = True) -> Any:
        return super().on_connect_check_health(check_health=False)  # type: ignore[misc]  # the driver's connection


class _Interruptible(_OneHandshake):
    """A mixin of the driver's connections that does not retry after a signal handler's exception of any class."""

    def read_response(self, *args: Any, **options: Any) -> Any:
        with carrying_interruptions():
            return super().read_response(*args, **options)  # type: ignore[misc]  # the driver's connection

    def send_packed_command(self, *args: Any, **options: Any) -> Any:
        with carrying_interruptions():
            return super().send_packed_command(*args, **options)  # type: ignore[misc]

    def _connect(self) -> Any:
        with carrying_interruptions():
            return super()._connect()  # type: ignore[misc]


class _Leaving(_Interruptible):
    """A mixin of the driver's connections that connects again after its server became a replica.

    A proxy or a name may lead to the new primary by then, while the old one keeps its connections open.
    """

    _is_stale = False

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return super().read_response(*args, **options)
        except exceptions.ResponseError as error:
            self._is_stale = self._is_stale or _is_demoted(error)
            raise

    def send_packed_command(self, *args: Any, **options: Any) -> Any:
        if self._is_stale:
            self._is_stale = False
            self.disconnect()  # type: ignore[attr-defined]
        return super().send_packed_command(*args, **options)


class _AsyncLeaving(_OneHandshake):
    """Like `_Leaving`, for asyncio."""

    _is_stale = False

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().read_response(*args, **options)  # type: ignore[misc]
        except exceptions.ResponseError as error:
            self._is_stale = self._is_stale or _is_demoted(error)
            raise

    async def send_packed_command(self, *args: Any, **options: Any) -> Any:
        if self._is_stale:
            self._is_stale = False
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
        return await super().send_packed_command(*args, **options)  # type: ignore[misc]


class _Locating(_Interruptible):
    """A mixin of the driver's connections that locates the server at each connect."""

    _locator: Locator

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)

    def _connect(self) -> Any:
        self.host, self.port = self._locator.locate()
        return super()._connect()

    def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            with _noticing_moves():
                return super().read_response(*args, **options)
        except exceptions.ConnectionError:
            self.disconnect()  # type: ignore[attr-defined]
            raise


class _AsyncLocating(_OneHandshake):
    """Like `_Locating`, for asyncio."""

    _locator: Locator

    def __init__(self, *, locator: Locator, **options: Any) -> None:
        self._locator = locator
        super().__init__(**options)

    async def _connect(self) -> None:
        self.host, self.port = await asyncio.to_thread(self._locator.locate)
        await super()._connect()  # type: ignore[misc]

    async def read_response(self, *args: Any, **options: Any) -> Any:
        try:
            with _noticing_moves():
                return await super().read_response(*args, **options)  # type: ignore[misc]
        except exceptions.ConnectionError:
            await self.disconnect(nowait=True)  # type: ignore[attr-defined]
            raise


class _AsyncPool(async_connection.BlockingConnectionPool):  # type: ignore[misc]  # the driver is untyped
    """The driver's pool, without connections that stay open after it is closed.

    A call in flight connects again, and its connection would stay open when the event loop closes.
    """

    _is_closed = False

    async def disconnect(self, inuse_connections: bool = True) -> None:
        self._is_closed = self._is_closed or inuse_connections
        await super().disconnect(inuse_connections)

    async def release(self, connection: Any) -> None:
        if self._is_closed:
            await connection.disconnect(nowait=True)
        await super().release(connection)


@cache
def _of_kind(mixin: type, connection_class: type) -> type:
    """Return the driver's connection class with a mixin."""
    return type(f"{mixin.__name__}{connection_class.__name__}", (mixin, connection_class), {})


def _check(url: str) -> None:
    """Raise InvalidAddress for a URL that the driver would misread, or reject only when it connects."""
    parts = _split(url)
    for name, _ in parse_qsl(parts.query):
        if name not in _URL_OPTIONS:
            raise InvalidAddress(f"no option {name} in a URL of this kind")
    if parts.scheme not in ("redis", "rediss", "unix"):
        raise InvalidAddress(
            "the URL should start with redis://, rediss:// (TLS) or unix://, for Sentinel and Cluster with "
            "redis+sentinel:// or redis+cluster:// (TLS: rediss+...); valkey is allowed in place of redis"
        )
    try:
        options = connection.parse_url(url)
        connection.ConnectionPool(**options).make_connection()  # does not connect
    except TypeError as error:
        unknown = re.search(r"argument '(\w+)'", str(error))
        raise InvalidAddress(f"no option {unknown[1] if unknown else error} in a URL of this kind") from None
    except (ValueError, redis.RedisError) as error:
        raise InvalidAddress(str(error)) from None
    if parts.scheme != "unix" and not re.fullmatch(r"/?|/\d{1,9}/?", parts.path):
        raise InvalidAddress("after the host comes / and the number of a database, or nothing")
    if not 0 <= int(options.get("db", 0)) < 10**9:
        raise InvalidAddress("the number of a database is 0 or more")
    for name, value in options.items():
        if isinstance(value, float) and not 0.0 < value <= _LONGEST_S:
            raise InvalidAddress(f"{name} is a number of seconds, up to {_LONGEST_S:.0f}")
    for name in _FILES:
        if name in options and not os.path.exists(options[name]):
            raise InvalidAddress(f"{name} names no file")


def _split(url: str) -> SplitResult:
    """Split a URL. Raises InvalidAddress for invalid hosts and ports."""
    try:
        parts = urlsplit(url)
        port = parts.port if "," not in parts.netloc else None
    except ValueError as error:
        # urlsplit's own message may quote part of a password that is not percent-encoded, as the port.
        message = "the port should be a number from 1 to 65535; in a password, percent-encode @ : / # ?"
        raise InvalidAddress(message if "Port" in str(error) else "the host is invalid") from None
    if parts.fragment or "@" in parts.query.partition("=")[0]:
        raise InvalidAddress("a URL has no # and no user after ?; in a password, percent-encode @ : / # ?")
    if port == 0:
        raise InvalidAddress("the port should be a number from 1 to 65535")
    if re.search(r"[\s\x00-\x1f]", parts.hostname or ""):
        raise InvalidAddress("a host's name has no spaces")
    return parts


def _node(text: str, default_port: int) -> Address:
    parts = _split(f"//{text}")
    if not parts.hostname:
        raise InvalidAddress("a host is missing its name")
    return parts.hostname, parts.port or default_port
