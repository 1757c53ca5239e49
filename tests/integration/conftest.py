"""Fixtures for nearly every test with a queue."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.worker.harness import QueueClient


@pytest.fixture
def client(valkey_url: str, queue_name: str) -> Iterator[QueueClient]:
    with QueueClient(valkey_url, queue_name) as client:
        yield client
