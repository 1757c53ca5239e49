"""A queue's decisions, seen from a running worker: limits, equal jobs, dead letters, the last progress."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill import Producer
from pagemill.producer.wire.calls import limits
from pagemill.producer.wire.calls.limits import QueueLimits
from pagemill.worker.worker import Worker
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

pytestmark = pytest.mark.slow


@pytest.fixture
def worker(valkey_url: str, queue_name: str) -> Iterator[Worker]:
    with running_worker(worker_config(valkey_url, queue_name)) as worker:
        yield worker


def test_a_rate_limit_holds_a_worker_back_and_says_so(worker: Worker, client: QueueClient) -> None:
    client.run(limits.set_limits(client.queue, QueueLimits(rate=0.001, burst=1)))
    first, second = client.submit({"prompt": "a"}, {"prompt": "b"})
    client.wait([first])
    eventually(lambda: worker.admission.blocked == "rate", "the worker to say why it waits")
    assert client.status(second).state == "queued"
    client.run(limits.set_limits(client.queue, QueueLimits()))
    client.wait([second])


def test_equal_jobs_run_once_and_each_has_its_result(client: QueueClient, valkey_url: str) -> None:
    fields = {"model": "echo", "prompt": "same", "temperature": 0.0, "dedupe": True}
    with Producer(valkey_url, queue=client.queue) as producer:
        batch = producer.submit_many(fields | {"key": f"k{i}", "metadata": {"row": i}} for i in range(8))
        with running_worker(worker_config(valkey_url, client.queue)):
            items = list(batch.results())
    results = {item.key: item.result for item in items}
    assert {key: result.metadata for key, result in results.items() if result} == {
        f"k{i}": {"row": i} for i in range(8)
    }
    assert {result.text for result in results.values() if result} == {"same"}
    ran = [result.id for result in results.values() if result and result.copied_from is None]
    assert len(ran) == 1
    assert {result.copied_from for result in results.values() if result} == {None, ran[0]}


def test_a_status_never_lags_behind_the_result(worker: Worker, client: QueueClient) -> None:
    jobs = client.submit(*({"prompt": "x" * 20, "max_tokens": 20} for _ in range(10)))
    client.wait(jobs)
    for job_id in jobs:
        progress = client.status(job_id).progress
        assert (progress.generated_tokens, progress.prompt_tokens_done) == (20, 20)


def test_a_worker_leaves_other_models_alone(worker: Worker, client: QueueClient) -> None:
    other, own = client.submit({"prompt": "a", "model": "other"}, {"prompt": "b"})
    client.wait([own])
    status = client.status(other)
    assert (status.state, status.error) == ("queued", "no live worker serves it (model other)")
