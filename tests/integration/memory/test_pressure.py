"""Real workers on a server whose memory runs out: producers flood it until they are rejected."""

from __future__ import annotations

import signal
import threading
import uuid
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.schema.job import Job
from tests.conftest import RedisServer, server_binary
from tests.worker.harness import QueueClient, WorkerProcess, eventually, process_settings

PADDING = 20_000
"""Bytes of a job that are not tokens."""
OUTPUT = 20
JOB = Job.parse({"prompt": "0123456789" * 2, "model": "echo", "max_tokens": OUTPUT})


@pytest.fixture(params=["valkey-server", pytest.param("redis-server", marks=pytest.mark.slow)])
def client(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueueClient]:
    """A queue on a server of 30 MB, Valkey and Redis 6.2."""
    server = RedisServer(server_binary(request.param), tmp_path / "server", ("--maxmemory", "30mb"))
    server.start()
    client = QueueClient(server.url, "q")
    yield client
    client.redis.close()
    server.stop()


def submit(url: str, number: int) -> list[tuple[str, str]]:
    """Submit large and short jobs, on a separate connection; returns their ids and the replies."""
    client = QueueClient(url, "q")
    items = []
    for _ in range(number):
        item = submissions.prepare(JOB, uuid.uuid4().hex)
        items.append(replace(item, payload=item.payload[:-1] + b" " * PADDING + b"}"))
    replies = client.run(submissions.submit("q", items))
    client.redis.close()
    return [(item.job_id, reply.status) for item, reply in zip(items, replies, strict=True)]


def flood(url: str, taken: list[str]) -> None:
    """Submit until the server rejects a job because its memory is full."""
    while True:
        replies = submit(url, 20)
        taken += [job_id for job_id, status in replies if status == "created"]
        if any(status == "memory" for _, status in replies):
            return


def flooded(client: QueueClient) -> list[str]:
    """The ids that two producers could submit until both were rejected."""
    taken: list[list[str]] = [[], []]
    floods = [threading.Thread(target=flood, args=(client.url, ids)) for ids in taken]
    for each in floods:
        each.start()
    for each in floods:
        each.join(timeout=120)
    assert all(taken)
    return [*taken[0], *taken[1]]


@pytest.mark.slow
@pytest.mark.parametrize("is_killed", [False, True], ids=["whole", "killed"])
def test_running_jobs_commit_and_nothing_is_lost(
    client: QueueClient, tmp_path: Path, is_killed: bool
) -> None:
    settings = process_settings(client.url, "q", model="echo:1", max_num_seqs=8)
    first = WorkerProcess(settings, tmp_path / "first.log")
    others: list[WorkerProcess] = []
    try:
        eventually(lambda: client.workers(), "the worker")
        ids = flooded(client)
        assert client.stats().memory.refused > 0
        eventually(lambda: client.stats().counts.get("running", 0) > 0, "jobs that run")
        if is_killed:
            first.signal(signal.SIGKILL)
            others.append(WorkerProcess(settings, tmp_path / "second.log"))
        with Producer(client.url, queue="q") as producer:
            later = producer.submit(prompt="x" * 1000, model="echo", max_tokens=OUTPUT, on_full="block").id
        outcomes = client.wait([*ids, later])
        assert {outcome.state for outcome in outcomes} == {"succeeded"}
        texts = {outcome.result.text for outcome in outcomes[:-1] if outcome.result is not None}
        assert texts == {"0123456789" * 2}
        counts = client.stats().counts
        assert (counts["succeeded"], counts.get("dead", 0), counts.get("failed", 0)) == (len(ids) + 1, 0, 0)
        assert not client.stats().memory.is_near
    finally:
        for worker in (first, *others):
            worker.kill()
    assert is_killed or "what holds it: pagemill queue stats" in first.log()
