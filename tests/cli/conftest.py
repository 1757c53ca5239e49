"""The commands run on the same servers as the producer's and the worker's tests."""

from __future__ import annotations

from tests.producer.conftest import producer, queue, valkey_queue
from tests.worker.conftest import client

__all__ = ["client", "producer", "queue", "valkey_queue"]
