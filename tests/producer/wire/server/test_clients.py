"""Addresses of servers: what is understood, and what is never repeated. The end of a client."""

from __future__ import annotations

import asyncio
import uuid
from urllib.parse import quote_plus

import pytest
import redis

from pagemill.producer.wire.server.clients import ServerAddress, has_password, open_async_client, redacted
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
        "http://h",
        "redis+sentinel://a:1",
        "redis+sentinel:///main",
        "redis+cluster://a/1",
        "redis+cluster://",
        "redis+cluster://a:x",
        "redis://:sec#ret@h:1",
        "redis+magic://h",
        "",
    ],
)
def test_what_is_no_address_is_refused_without_being_quoted(url: str) -> None:
    with pytest.raises(ValueError) as refused:
        ServerAddress.parse(url)
    assert "sec" not in str(refused.value)


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
    """It connects only after the pool was closed, which therefore knew nothing to close."""
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
