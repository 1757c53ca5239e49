"""One gateway and one echo worker for a whole module."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from openai import OpenAI

from tests.producer.gateway.serving import Served, gateway
from tests.worker.harness import PATIENCE_S, running_worker, worker_config


@pytest.fixture(scope="module")
def queue() -> str:
    return f"q-{uuid.uuid4().hex[:12]}"


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    """The worker takes 2 ms per token. Modules override this."""
    return {"model": "echo:2", "max_num_seqs": 64}


@pytest.fixture(scope="module")
def served(valkey_url: str, queue: str, worker_settings: dict[str, Any]) -> Iterator[Served]:
    """An open gateway, and a worker."""
    config = worker_config(valkey_url, queue, **worker_settings)
    with running_worker(config), gateway(valkey_url, queue) as served:
        yield served


@pytest.fixture(scope="module")
def client(served: Served) -> Iterator[OpenAI]:
    with OpenAI(base_url=served.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client:
        yield client
