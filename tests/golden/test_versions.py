"""Workers of two releases on one queue.

The older one is this tree as it is. For the newer one a field is declared as later.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pagemill.producer.wire.calls import history, rollouts
from pagemill.producer.wire.calls.rollouts import Rollout
from pagemill.producer.wire.schema.needs import LATER_FIELDS
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

NEW = {"prompt": "0123456789" * 4, "max_tokens": 40, "min_p": 0.5}
OLD = {"prompt": "abcdefghij" * 4, "max_tokens": 40}


@pytest.fixture
def client(valkey_url: str, queue_name: str) -> Iterator[QueueClient]:
    with QueueClient(valkey_url, queue_name) as client:
        yield client


@pytest.fixture
def older(client: QueueClient, tmp_path: Path) -> Iterator[WorkerProcess]:
    worker = WorkerProcess(process_settings(client.url, client.queue, model="echo:20"), tmp_path / "log")
    eventually(lambda: [info for info in client.workers() if info.state == "ready"], "the older worker")
    yield worker
    worker.kill()


@pytest.fixture
def newer_release(older: WorkerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is of a release that brought `min_p`; the older worker's is not."""
    monkeypatch.setitem(LATER_FIELDS, "min_p", "0.2.0")


def workers_of(client: QueueClient, job_id: str) -> set[str | None]:
    found = client.run(history.history(client.queue, job_id))
    assert found is not None
    return {execution.worker for execution in found.executions}


@pytest.mark.usefixtures("newer_release")
def test_a_job_with_a_later_field_waits_for_a_newer_worker_and_says_why(client: QueueClient) -> None:
    (new,) = client.submit(NEW | {"priority": "high"})
    (outcome,) = client.wait(client.submit(OLD))
    assert outcome.state == "succeeded"
    status = client.status(new)
    assert (status.state, status.attempt) == ("queued", 0)
    assert status.error == "no live worker of model echo knows all that the job needs: min_p"
    found = client.run(history.history(client.queue, new))
    assert found is not None
    assert found.unmet == ("min_p",)
    with running_worker(worker_config(client.url, client.queue)) as newer:
        (outcome,) = client.wait([new])
        assert workers_of(client, new) == {newer.worker_id}
    assert outcome.result is not None
    assert outcome.result.text == NEW["prompt"]


def test_an_upgrade_with_jobs_in_flight_and_a_rollout_loses_nothing(
    client: QueueClient, older: WorkerProcess, newer_release: None
) -> None:
    """Each job is committed once, though the older worker is killed; it runs none that it does not know."""
    (old_id,) = (info.id for info in client.workers())
    plain = client.submit(*[OLD] * 12)
    eventually(lambda: any(client.generated(job_id) >= 5 for job_id in plain), "a checkpoint")
    with running_worker(worker_config(client.url, client.queue, model="echo:20", revision_name="v2")):
        assert client.run(rollouts.start(client.queue, "echo", Rollout("v2", 0.5))) == "ok"
        later = client.submit(*[NEW] * 12)
        plain += client.submit(*[OLD] * 12)
        older.kill()
        outcomes = client.wait([*plain, *later])
    texts = [outcome.result.text for outcome in outcomes if outcome.result is not None]
    assert texts == [OLD["prompt"]] * len(plain) + [NEW["prompt"]] * len(later)
    assert client.stats().counts["succeeded"] == len(outcomes)
    assert not any(old_id in workers_of(client, job_id) for job_id in later)
