"""Faults of a worker itself: leases that it renews too late, errors between the pull and the start of jobs."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import Producer
from pagemill.worker.jobs.running_job import RunningJob
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow


def test_a_job_that_its_worker_pulls_again_leaves_no_request(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after the worker's process has been suspended for longer than a lease."""
    config = worker_config(valkey_url, queue_name, model="echo:20", lease_s=1.5)
    text = "abc " * 50
    with (
        running_worker(config) as worker,
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        job = producer.submit(prompt=text, model="echo", max_tokens=len(text))
        with monkeypatch.context() as frozen:
            frozen.setattr(worker.leases, "_renew_leases", lambda: None)
            eventually(lambda: len(worker.table.running()) == 2, "a second execution")
        assert job.result(PATIENCE_S).text == text
        eventually(lambda: not worker.table.running(), "the end of both executions")
        assert len(worker.table) == 0


def test_an_error_before_jobs_start_requeues_them(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    announcement = RunningJob.announcement
    failures = iter([MemoryError("no memory")])

    def failing(self: RunningJob, *args: Any) -> Any:
        if (error := next(failures, None)) is not None:
            raise error
        return announcement(self, *args)

    monkeypatch.setattr(RunningJob, "announcement", failing)
    with Producer(valkey_url, queue=queue_name) as producer:
        jobs = [producer.submit(prompt=f"p{number}", model="echo") for number in range(3)]
        with running_worker(worker_config(valkey_url, queue_name)):
            assert [job.result(PATIENCE_S).text for job in jobs] == ["p0", "p1", "p2"]
        assert [job.status().attempt for job in jobs] == [1, 1, 1]
