"""A queue in this process."""

from __future__ import annotations

from types import TracebackType
from typing import Self
from uuid import uuid4

from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.server.memory import forget, memory_client


class MemoryQueue:
    """A queue in memory, deleted at the end. `Producer(queue.url)` is a producer like any other.

    The queue's real scripts run, so ids, batches, deadlines, priorities and errors behave as on a server.

    Args:
        name: name of the queue.

    Raises:
        InvalidAddress: the extra `testing` is not installed.
    """

    def __init__(self, name: str = "default") -> None:
        self.name = name
        self.url = f"memory://{uuid4().hex}"
        self._producers: list[Producer] = []
        memory_client(self.url).close()  # raises here rather than in the service under test

    def producer(self) -> Producer:
        """Return a producer, which is closed with the queue."""
        self._producers.append(Producer(self.url, queue=self.name))
        return self._producers[-1]

    def async_producer(self) -> AsyncProducer:
        """Return a producer for asyncio, which the caller closes."""
        return AsyncProducer(self.url, queue=self.name)

    def close(self) -> None:
        """Close its producers and delete the queue."""
        for producer in self._producers:
            producer.close()
        forget(self.url)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
