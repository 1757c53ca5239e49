"""A committed result stays, though its worker does not learn of the commit before its lease is renewed."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest

from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.server.scripts import Call
from pagemill.worker.job_queue import JobQueue
from tests.integration.storage.conftest import TestedStore, storing, swept
from tests.integration.storage.test_stored_jobs import JOB, LARGE, producer_of
from tests.worker.harness import QueueClient, eventually, running_worker

pytestmark = pytest.mark.slow

AWAY_S = 3.0
"""Longer than the interval in which the tests' workers renew a lease."""


def test_a_reply_that_is_lost(
    client: QueueClient, files: TestedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    send, began = JobQueue.run_many, [0.0]

    def losing(queue: JobQueue, calls: Sequence[Call[Any]]) -> list[Any]:
        if not any(call.script == "commit" for call in calls):
            return send(queue, calls)
        if not began[0]:
            began[0] = time.monotonic()
            send(queue, calls)
        if time.monotonic() < began[0] + AWAY_S:
            raise RedisUnavailable("the reply was lost")
        return send(queue, calls)

    monkeypatch.setattr(JobQueue, "run_many", losing)
    with producer_of(client, files) as producer, running_worker(storing(client, files)) as worker:
        job = producer.submit(JOB)
        eventually(lambda: not worker.table.by_job(job.id) and began[0], "its end here")
        swept(worker, client)
        assert job.result(timeout=60).text == LARGE


def test_a_disk_that_is_slow(
    client: QueueClient, files: TestedStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    sync, began = JobQueue.sync, [0.0]

    def slow(queue: JobQueue) -> Any:
        began[0] = began[0] or time.monotonic()
        if time.monotonic() < began[0] + AWAY_S:
            raise RedisUnavailable("the disk is slow")
        return sync(queue)

    monkeypatch.setattr(JobQueue, "sync", slow)
    settings = storing(client, files, durability="fsync")
    with producer_of(client, files) as producer, running_worker(settings) as worker:
        job = producer.submit(JOB)
        assert job.result(timeout=60).text == LARGE
        eventually(lambda: not worker.table.by_job(job.id), "its end here")
        swept(worker, client)
        assert job.result(timeout=60).text == LARGE
