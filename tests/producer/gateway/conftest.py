"""One gateway and one echo worker for a whole module."""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import pytest
from openai import OpenAI

from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, running_worker, worker_config


@pytest.fixture(scope="module")
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def served(valkey_url: str, queue: str) -> Iterator[Served]:
    """An open gateway, and a worker that echoes 2 ms a token."""
    config = worker_config(valkey_url, queue, model="echo:2", max_num_seqs=64)
    with running_worker(config), gateway(valkey_url, queue) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
