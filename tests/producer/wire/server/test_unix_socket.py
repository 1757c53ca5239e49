"""Over a unix socket, which producers use to reach a local worker's embedded server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill import AsyncProducer, Producer
from tests.conftest import RedisServer, server_binary


@pytest.fixture
def unix_url(tmp_path: Path) -> Iterator[str]:
    # A socket's path is limited to about a hundred bytes, and pytest's directories may be longer.
    with tempfile.TemporaryDirectory() as directory:
        socket = f"{directory}/valkey.sock"
        with RedisServer(server_binary("valkey-server"), tmp_path / "valkey", ("--unixsocket", socket)):
            yield f"unix://{socket}"


def test_submit_and_ask(unix_url: str) -> None:
    with Producer(unix_url) as producer:
        handle = producer.submit(prompt="hello", model="m")
        assert handle.status().state == "queued"


async def test_submit_and_ask_asynchronously(unix_url: str) -> None:
    async with AsyncProducer(unix_url) as producer:
        handle = await producer.submit(prompt="hello", model="m")
        assert (await handle.status()).state == "queued"
