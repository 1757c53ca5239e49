"""What nearly every test with a queue needs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.harness import QueueClient


@pytest.fixture
def client(valkey_url: str, queue_name: str) -> Iterator[QueueClient]:
    client = QueueClient(valkey_url, queue_name)
    yield client
    client.redis.close()
