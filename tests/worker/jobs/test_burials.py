"""A job that has killed five workers is dead, and the worker that buries it logs it."""

from __future__ import annotations

import logging

import pytest

from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.outputs import Progress
from pagemill.worker.status.queue_exporter import QueueSet
from tests.worker.harness import QueueClient, eventually, running_worker, worker_config

SECRET = "a word that no log may hold"


@pytest.fixture
def poison(client: QueueClient) -> str:
    """A job whose fifth worker has just died; no sweep has run since."""
    (job_id,) = client.submit({"prompt": SECRET})
    for victim in range(5):
        # Its sweep finds the loss before.
        (job,) = client.run(
            transitions.pull(client.queue, f"victim-{victim}", ["echo"], 1, 10**9, 10_000)
        ).jobs
        assert job.crashes == victim
        prefill = Progress(phase="prefill", prompt_tokens=1, max_tokens=1)
        client.run(transitions.checkpoint(client.queue, job_id, job.token, prefill, ()))
        client.redis.zadd(keys.prefix(client.queue) + "leases", {job_id: 1}, xx=True)
    return job_id


def check(records: list[logging.LogRecord], client: QueueClient, job_id: str) -> None:
    (warning,) = [record for record in records if getattr(record, "code", None) == "crash_suspect"]
    assert warning.levelno == logging.WARNING
    assert (warning.job_id, warning.crashes) == (job_id, 5)  # type: ignore[attr-defined]
    assert f"pagemill inspect {job_id} --queue {client.queue}" in warning.getMessage()
    assert not any(SECRET in repr(vars(record)) for record in records)
    assert client.status(job_id).state == "dead"


def test_the_worker_that_sweeps_it_says_so(
    client: QueueClient, poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    with running_worker(worker_config(client.url, client.queue)):
        eventually(lambda: client.status(poison).state == "dead", "its end")
        client.wait(client.submit({"prompt": "another"}))  # the next pull came after the warning
    check(caplog.records, client, poison)


def test_the_exporter_that_sweeps_it_says_so(
    client: QueueClient, poison: str, caplog: pytest.LogCaptureFixture
) -> None:
    queues = QueueSet(client.url, [client.queue], lease_patience_ms=0)
    queues.read()
    queues.read()
    queues.close()
    check(caplog.records, client, poison)
