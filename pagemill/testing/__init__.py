"""For the tests of services: a queue in memory and an echo worker, as pytest fixtures and as context managers."""

from __future__ import annotations

from pagemill.testing.queue import MemoryQueue
from pagemill.testing.worker import EchoWorker

__all__ = ["EchoWorker", "MemoryQueue"]
