from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.chaos.echo_endpoint import EchoEndpoint
from tests.chaos.fork_server import ForkedWorker, ForkServer
from tests.conftest import RedisServer
from tests.worker.harness import QueueClient, process_settings

Spawn = Callable[..., ForkedWorker]
on_both_hosts = pytest.mark.parametrize(
    "engine", ["own", pytest.param("endpoint", marks=pytest.mark.slow)], indirect=True
)
"""Runs a test with Pagemill's engine, and with an endpoint that another process serves."""


@pytest.fixture
def client(own_valkey: RedisServer, queue_name: str) -> Iterator[QueueClient]:
    with QueueClient(own_valkey.url, queue_name) as client:
        yield client


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> str:
    """The location of the workers' engine: see `on_both_hosts`."""
    return str(getattr(request, "param", "own"))


@pytest.fixture
def endpoint() -> Iterator[EchoEndpoint]:
    with EchoEndpoint() as endpoint:
        yield endpoint


@pytest.fixture
def fork_server(
    request: pytest.FixtureRequest, own_valkey: RedisServer, queue_name: str, tmp_path: Path, engine: str
) -> Iterator[ForkServer]:
    """Workers on the test's own server; remaining ones are killed at the end."""
    settings = process_settings(own_valkey.url, queue_name)
    if engine == "endpoint":
        url = request.getfixturevalue("endpoint").url
        settings |= {"model": None, "engine_url": url, "served_model_name": "echo", "engine_stall_s": 5.0}
    with ForkServer(tmp_path, settings) as fork_server:
        yield fork_server


@pytest.fixture
def spawn(fork_server: ForkServer) -> Spawn:
    """Start worker processes."""
    return fork_server.spawn
