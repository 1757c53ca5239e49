from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import Producer


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    """A producer of a queue without a worker; test modules may override it."""
    with Producer(valkey_url, queue=queue_name) as producer:
        yield producer
