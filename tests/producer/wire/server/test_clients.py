"""Addresses of servers: accepted forms, and parts that are never repeated. The shutdown of a client."""

from __future__ import annotations

import asyncio
import inspect
import uuid
from urllib.parse import quote_plus

import pytest
import redis
from redis import connection

from pagemill.producer.wire.schema.errors import InvalidAddress
from pagemill.producer.wire.server.clients import (
    ServerAddress,
    has_password,
    open_async_client,
    open_client,
    redacted,
)
from pagemill.producer.wire.server.discovery import find_redis, with_credentials
from tests.worker.harness import eventually


def test_a_plain_address_is_the_drivers() -> None:
    for url in ("redis://h:1/2", f"rediss://u:p@h:1/2?ssl_ca_certs={__file__}", "unix:///tmp/s?db=1"):
        address = ServerAddress.parse(url)
        assert (address.url, address.nodes, address.locator("q")) == (url, (), None)


def test_a_sentinel_address() -> None:
    address = ServerAddress.parse(
        f"rediss+sentinel://u:p%40ss@a,b:26380,[::1]:3/main/4?sentinel_password=s&ssl_ca_certs={__file__}"
    )
    assert address.url == f"rediss://u:p%40ss@a:26379/4?ssl_ca_certs={quote_plus(__file__)}"
    assert address.nodes == (("a", 26379), ("b", 26380), ("::1", 3))
    assert (address.kind, address.service) == ("sentinel", "main")
    assert dict(address.sentinel_options) == {"password": "s"}


def test_a_cluster_address() -> None:
    address = ServerAddress.parse("redis+cluster://a:7000,b:7001")
    assert (address.kind, address.nodes) == ("cluster", (("a", 7000), ("b", 7001)))


@pytest.mark.parametrize(
    "url",
    [
        "http://h", "redis+sentinel://a:1", "redis+sentinel:///main", "redis+cluster://a/1",
        "redis+cluster://", "redis+cluster://a:x", "redis://:sec#ret@h:1", "redis+magic://h", "",
        "redis://:1#sec@h", "redis://:1?sec@h", "redis://:p@sec#x@h:1",
    ],
)  # fmt: skip
def test_what_is_no_address_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError) as refused:
        ServerAddress.parse(url)
    assert "sec" not in str(refused.value)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://h:1/2?decode_responses=True", "redis://h:1/2"),
        ("redis://h?encoding=utf-16&db=3&max_connections=1&timeout=0", "redis://h?db=3"),
        ("unix:///tmp/s?db=1&legacy_responses=no", "unix:///tmp/s?db=1"),
        ("valkey://u:p@h:1/2", "redis://u:p@h:1/2"),
        ("valkeys://h", "rediss://h"),
        ("valkey+sentinel://a:1,b/main?decode_responses=1", "redis://a:1/0"),
        ("valkeys+cluster://a:1?retry_on_timeout=1", "rediss://a:1/0"),
    ],
)
def test_options_of_other_programs_are_ignored(url: str, expected: str) -> None:
    assert ServerAddress.parse(url).url == expected
    for opened in (open_client(url, "q"), open_async_client(url, "q", max_connections=2)):
        pool = opened.connection_pool
        if "+" not in url:
            made = pool.make_connection()
            assert not made.encoder.decode_responses
            assert made.encoder.encoding == "utf-8"


def _url_options() -> list[str]:
    """Every option that the driver accepts in a URL."""
    names: set[str] = set(connection.URL_QUERY_ARGUMENT_PARSERS)
    for kind in (
        connection.AbstractConnection,
        connection.Connection,
        connection.SSLConnection,
        connection.UnixDomainSocketConnection,
        connection.ConnectionPool,
        connection.BlockingConnectionPool,
    ):
        names |= set(inspect.signature(kind.__init__).parameters)
    return sorted(names - {"self", "kwargs", "connection_kwargs"})


def test_every_option_of_the_driver_is_allowed_ignored_or_rejected() -> None:
    """None changes the assumptions of the calls, and none fails later than at startup."""
    values = {"protocol": "3", "db": "1", "ssl_min_version": "771"}
    for name in _url_options():
        for value in (values.get(name, "1"), "x"):
            url = f"rediss://h?{name}={value}"
            try:
                ServerAddress.parse(url)
            except InvalidAddress:
                continue
            made = open_client(url, "q").connection_pool.make_connection()
            assert (made.host, made.port, made.encoder.decode_responses) == ("h", 6379, False), name
            open_async_client(url, "q", max_connections=2).connection_pool.make_connection()


def test_passwords_are_not_shown() -> None:
    assert redacted("redis://u:secret@h:1/0") == "redis://u:***@h:1/0"
    assert redacted("redis+sentinel://:s@a,b/m?sentinel_password=t&db=0") == (
        "redis+sentinel://:***@a,b/m?sentinel_password=***&db=0"
    )
    assert not has_password("redis://h:1/0")
    assert has_password("rediss://:x@h")


def test_credentials_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert with_credentials("redis://h:1/0") == "redis://h:1/0"
    monkeypatch.setenv("PAGEMILL_REDIS_PASSWORD", "p@ss")
    assert find_redis("redis://h:1/0") == "redis://:p%40ss@h:1/0"
    monkeypatch.setenv("PAGEMILL_REDIS_USERNAME", "me")
    assert with_credentials("redis+cluster://a,b") == "redis+cluster://me:p%40ss@a,b"
    assert with_credentials("redis://own:word@h") == "redis://own:word@h"


async def test_a_call_in_flight_leaves_no_connection_behind(valkey_url: str) -> None:
    """It connects only after the pool was closed, which therefore had no connection to close."""
    name = uuid.uuid4().hex
    client = open_async_client(valkey_url, "q", max_connections=1, client_name=name)
    call = asyncio.create_task(client.ping())
    await asyncio.sleep(0)
    await client.aclose()
    await call
    with redis.Redis.from_url(valkey_url) as admin:
        eventually(
            lambda: name not in {each["name"] for each in admin.client_list()}, "the connection's end", 10
        )
