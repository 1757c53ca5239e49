from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.conftest import RedisServer, server_binary


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """A server for one test: Celery's keys do not have a queue in their names."""
    with RedisServer(server_binary("valkey-server"), tmp_path_factory.mktemp("celery")) as server:
        yield server
