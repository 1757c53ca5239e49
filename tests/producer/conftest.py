"""Queues on real servers for the tests of the wire contract."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RedisServer
from tests.producer.driving import Queue, open_queue


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> Iterator[Queue]:
    """An empty queue, on Valkey and on Redis 6.2."""
    queue = open_queue(redis_url, queue_name)
    yield queue
    queue.transport.close()


@pytest.fixture
def valkey_queue(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    """An empty queue on Valkey only, for what does not depend on the server."""
    queue = open_queue(valkey_url, queue_name)
    yield queue
    queue.transport.close()


@pytest.fixture
def own_queue(own_valkey: RedisServer) -> Iterator[Queue]:
    """A queue on a server of this test alone."""
    queue = open_queue(own_valkey.url, "q")
    yield queue
    queue.transport.close()
