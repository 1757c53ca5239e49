"""Jobs of the packaged model that ran once, with their inputs kept, and workers to run them again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from pagemill.worker.config import WorkerConfig
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

LOADING_S = 400


@contextmanager
def announced_worker(config: WorkerConfig, client: QueueClient) -> Iterator[str]:
    """A worker that the registry lists as ready; yields its fingerprint."""
    with running_worker(config, load_patience_s=LOADING_S) as worker:

        def fingerprint() -> str:
            found = {info.id: info.fingerprints for info in client.workers()}
            return found.get(worker.worker_id, {}).get("", "")

        yield eventually(fingerprint, "the registry knows")


@pytest.fixture(scope="session")
def smollm2(valkey_url: str) -> Any:
    def config(queue: str, **settings: Any) -> WorkerConfig:
        fields = {"model": "smollm2", "kv_cache_memory_bytes": 128 << 20, "num_threads": 1, **settings}
        return worker_config(valkey_url, queue, **fields)

    return config
