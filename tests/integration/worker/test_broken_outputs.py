"""A job whose output the worker cannot process fails alone: other outputs of the same step are not lost."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill.worker.jobs.running_job import RunningJob
from tests.worker.harness import QueueClient, running_worker, worker_config

TEXT = "abcdefghijklmnopqrstuvwxyz0123456789"


@pytest.mark.parametrize("step", ["apply", "result_json"])
def test_an_output_that_cannot_be_processed_fails_its_job_alone(
    client: QueueClient, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(RunningJob, step)

    def fail(job: RunningJob, *arguments: Any, **options: Any) -> Any:
        if job.job.prompt == "poison":
            raise UnicodeEncodeError("utf-8", "\ud83d", 0, 1, "surrogates not allowed")
        return original(job, *arguments, **options)

    monkeypatch.setattr(RunningJob, step, fail)
    config = worker_config(client.url, client.queue, model="echo:5", engine_process="off")
    jobs = [{"prompt": TEXT, "max_tokens": len(TEXT)} for _ in range(12)]
    with running_worker(config):
        (poison,) = client.submit({"prompt": "poison", "max_tokens": 6, "max_attempts": 2})
        healthy = client.submit(*jobs)
        assert [result.text for result in client.results(healthy)] == [TEXT] * 12
        client.wait([poison])
    ended = client.outcome(poison)
    assert ended.state == "dead"
    assert ended.error is not None
    assert (ended.error.code, ended.error.cause) == ("attempts_exhausted", "output_invalid")
