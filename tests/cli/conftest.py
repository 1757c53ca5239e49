"""The commands are tried on what the producer's and the worker's tests are tried on."""

from __future__ import annotations

from tests.producer.conftest import producer, queue, valkey_queue
from tests.worker.conftest import client

__all__ = ["client", "producer", "queue", "valkey_queue"]
