"""The body of `pagemill.generate` when its server loses the job."""

from __future__ import annotations

from typing import Any

import pytest
from celery import Celery

from pagemill.producer.celery import task as task_module
from pagemill.producer.celery.task import NativeTask
from pagemill.producer.client.sync import Producer
from pagemill.producer.wire.schema.errors import RedisUnavailable
from tests.producer.driving import open_queue


def test_a_failover_that_lost_the_job_makes_the_task_submit_it_again(
    valkey_url: str, queue_name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(task_module, "RETRY_S", 0.0)
    queue = open_queue(valkey_url, queue_name)
    with Producer(valkey_url, queue=queue_name, model="m") as producer:
        run_flow, calls = producer.run_flow, []

        def failing_over(flow: Any) -> Any:
            calls.append(flow)
            if (
                len(calls) == 2
            ):  # the first one submitted the job; the replica that takes over never had the job
                assert queue.client.delete(*queue.client.keys(f"{queue.prefix}*"))
                raise RedisUnavailable("failing over")
            if len(calls) == 4:
                queue.commit(queue.pull_one(), text="again")
            return run_flow(flow)

        monkeypatch.setattr(producer, "run_flow", failing_over)
        fields = {"name": "test.generate", "producer": producer, "abstract": False}
        task = Celery("test", set_as_current=False).register_task(type("Generation", (NativeTask,), fields)())
        task.push_request(id="job-1", ignore_result=True, timelimit=None)
        assert task.run(prompt="hello")["text"] == "again"
        assert len(calls) == 5, "the last one waits for the result"
    queue.transport.close()
