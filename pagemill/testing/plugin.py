"""The pytest plugin with the fixtures `pagemill_queue` and `pagemill_worker`.

pytest loads it through an entry point wherever pagemill is installed, so importing it must not need any extra.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from pagemill.testing import EchoWorker, MemoryQueue


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini("pagemill_model", "the model that pagemill_worker serves", default="echo")


@pytest.fixture
def pagemill_queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[MemoryQueue]:
    """A queue in memory. PAGEMILL_REDIS_URL names it, so that a service's own `Producer()` uses it."""
    from pagemill.testing import MemoryQueue

    with MemoryQueue() as queue:
        monkeypatch.setenv("PAGEMILL_REDIS_URL", queue.url)
        yield queue


@pytest.fixture
def pagemill_worker(pagemill_queue: MemoryQueue, pytestconfig: pytest.Config) -> Iterator[EchoWorker]:
    """A worker of that queue with the echo model. The ini option `pagemill_model` is the served name."""
    from pagemill.testing import EchoWorker

    model = str(pytestconfig.getini("pagemill_model"))
    with EchoWorker(pagemill_queue.url, pagemill_queue.name, model=model) as worker:
        yield worker
