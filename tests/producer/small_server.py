"""A server of 30 MB, and ways to fill it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.conftest import RedisServer, server_binary
from tests.producer.driving import Queue, open_queue

PROMPT = "x" * 20_000
MOST = 30 << 20


@contextmanager
def small_server(directory: Path, binary: str = "valkey-server", most: int = MOST) -> Iterator[Queue]:
    """Start a server and open the queue `q` on it."""
    server = RedisServer(server_binary(binary), directory / binary, ("--maxmemory", str(most)))
    server.start()
    queue = open_queue(server.url, "q")
    try:
        yield queue
    finally:
        queue.transport.close()
        server.stop()


def flood(queue: Queue, prompt: str = PROMPT) -> list[str]:
    """Submit until the server rejects a job because its memory is full; returns the accepted ids."""
    taken: list[str] = []
    for call in range(10_000):
        ids = [f"flood-{call}-{i}" for i in range(20)]
        statuses = queue.submit(*ids, prompt=prompt)
        taken += [job_id for job_id, status in zip(ids, statuses, strict=True) if status == "created"]
        if "memory" in statuses:
            assert set(statuses) <= {"created", "memory"}
            return taken
    raise AssertionError("a server of 30 MB took all jobs")
