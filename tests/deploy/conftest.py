"""Supply chain tests run a worker on the queue client of the worker tests."""

from __future__ import annotations

from tests.worker.conftest import client

__all__ = ["client"]
