"""Queues on real servers for the tests of the wire contract."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from pagemill import AsyncProducer, Producer
from tests.conftest import ROOT, RedisServer
from tests.producer.driving import Queue, open_queue
from tests.topologies import Certificates


@pytest.fixture
def queue(redis_url: str, queue_name: str) -> Iterator[Queue]:
    """An empty queue, on Valkey and on Redis 6.2."""
    with open_queue(redis_url, queue_name) as queue:
        yield queue


@pytest.fixture
def valkey_queue(valkey_url: str, queue_name: str) -> Iterator[Queue]:
    """An empty queue on Valkey only, for tests that do not depend on the server."""
    with open_queue(valkey_url, queue_name) as queue:
        yield queue


@pytest.fixture
def own_queue(own_valkey: RedisServer) -> Iterator[Queue]:
    """A queue on a server for this test alone."""
    with open_queue(own_valkey.url, "q") as queue:
        yield queue


@pytest.fixture
def producer(queue: Queue) -> Iterator[Producer]:
    """A producer of `queue`; folders may override it with one of Valkey only."""
    with Producer(queue.url, queue=queue.name) as producer:
        yield producer


@pytest.fixture
async def aio(queue: Queue) -> AsyncIterator[AsyncProducer]:
    async with AsyncProducer(queue.url, queue=queue.name) as producer:
        yield producer


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates(tmp_path_factory.mktemp("certificates"))


NODE_CLIENT = ROOT / "clients/typescript"


@pytest.fixture(scope="session")
def node_client(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the TypeScript client, built with its dependencies."""
    if shutil.which("npm") is None:
        pytest.skip("needs Node")
    directory = tmp_path_factory.mktemp("node") / "typescript"
    shutil.copytree(NODE_CLIENT, directory, ignore=shutil.ignore_patterns("node_modules", "dist"))
    install = ["npm", "install", "--no-audit", "--no-fund", "--loglevel", "error"]
    run = subprocess.run(install, cwd=directory, capture_output=True, text=True, check=False, timeout=300)
    if run.returncode:
        pytest.skip(f"npm cannot install the client's dependencies: {run.stderr[-300:]}")
    built = subprocess.run(
        ["npm", "run", "build"],
        cwd=directory,
        env=os.environ | {"PAGEMILL_LUA": str(ROOT / "producer/wire/lua")},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert built.returncode == 0, built.stdout
    return directory
