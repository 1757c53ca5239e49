from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.nursery import ForkedWorker, Nursery
from tests.conftest import RedisServer
from tests.worker.harness import QueueClient, process_settings

Spawn = Callable[..., ForkedWorker]


@pytest.fixture
def client(own_valkey: RedisServer, queue_name: str) -> Iterator[QueueClient]:
    client = QueueClient(own_valkey.url, queue_name)
    yield client
    client.redis.close()


@pytest.fixture
def nursery(own_valkey: RedisServer, queue_name: str, tmp_path: Path) -> Iterator[Nursery]:
    """Workers on the test's own server; what is left of them at the end is killed."""
    with Nursery(tmp_path, process_settings(own_valkey.url, queue_name)) as nursery:
        yield nursery


@pytest.fixture
def spawn(nursery: Nursery) -> Spawn:
    """Start worker processes."""
    return nursery.spawn
