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
    """A job whose fifth worker has just crashed; no sweep has run since."""
    (job_id,) = client.submit({"prompt": SECRET})
    for victim in range(5):
        # The worker's sweep finds the loss first.
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_the_worker_that_takes_a_job_over_says_so(
    client: QueueClient, caplog: pytest.LogCaptureFixture
) -> None:
    (job_id,) = client.submit({"prompt": SECRET})
    (job,) = client.run(transitions.pull(client.queue, "victim", ["echo"], 1, 10**9, 10_000)).jobs
    assert (job.job_id, job.taken_over_from) == (job_id, "")
    client.redis.zadd(keys.prefix(client.queue) + "leases", {job_id: 1}, xx=True)
    caplog.set_level(logging.INFO)
    with running_worker(worker_config(client.url, client.queue)):
        client.wait([job_id])
        client.wait(client.submit({"prompt": "another"}))
    told = {
        record.getMessage(): record for record in caplog.records if getattr(record, "job_id", "") == job_id
    }
    lapsed, taken = told["lease lapsed; its job waits for another worker"], told["job taken over"]
    assert (lapsed.lost_by, taken.lost_by) == ("victim", "victim")  # type: ignore[attr-defined]
    assert lapsed.levelno == taken.levelno == logging.WARNING
    assert not any(SECRET in repr(vars(record)) for record in caplog.records)


def test_a_job_that_was_requeued_was_not_lost(client: QueueClient) -> None:
    (job_id,) = client.submit({"prompt": "x"})

    def pull(worker: str) -> transitions.PulledJob:
        (job,) = client.run(transitions.pull(client.queue, worker, ["echo"], 1, 10**9, 10_000)).jobs
        return job

    first = pull("first")
    client.run(transitions.release(client.queue, job_id, first.token))
    second = pull("second")
    assert second.taken_over_from == ""
    client.redis.zadd(keys.prefix(client.queue) + "leases", {job_id: 1}, xx=True)
    assert client.run(transitions.sweep(client.queue)).lapsed == ((job_id, "second"),)
    third = pull("third")
    assert third.taken_over_from == "second"
    client.run(transitions.release(client.queue, job_id, third.token))
    assert pull("fourth").taken_over_from == "", "it was requeued since"
