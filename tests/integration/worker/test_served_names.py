"""A worker's aliases on a real queue, and checkpoints between a hub's model and a folder."""

from __future__ import annotations

import pytest

from pagemill import Producer
from pagemill.cli.app import default_model
from pagemill.producer.wire.schema.errors import InvalidJob
from tests.worker.harness import QueueClient, eventually, get_json, running_worker, worker_config

pytestmark = pytest.mark.slow

COMMIT = "a" * 12


def test_every_name_is_a_lane_of_one_worker(valkey_url: str, client: QueueClient) -> None:
    names = ("org/main", "alias", "echo:x+y@z")
    with Producer(valkey_url, queue=client.queue) as producer:
        waiting = [producer.submit(prompt=name, model=name) for name in names]  # before there is a worker
        with running_worker(
            worker_config(valkey_url, client.queue, model="echo", served_model_name=names)
        ) as worker:
            later = [producer.submit(prompt=name, model=name) for name in names]  # notifies an idle one
            assert [job.result(timeout=120).text for job in waiting + later] == [*names, *names]
            assert default_model(valkey_url, client.queue) == "org/main"
            _, ready = get_json(f"{worker.http_url}/readyz")
            assert (ready["model"], ready["models"]) == ("org/main", list(names))
            other = worker_config(valkey_url, client.queue, model="echo", served_model_name=("alias",))
            with running_worker(other):
                eventually(
                    lambda: sum(bool(info.models) for info in client.workers()) == 2, "both heartbeats"
                )
                with pytest.raises(InvalidJob, match="alias, org/main"):
                    default_model(valkey_url, client.queue)


@pytest.mark.parametrize("keys", ["", "k" * 32])
def test_a_folder_continues_what_a_commit_began(
    keys: str, client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PAGEMILL_HMAC_KEYS", keys)
    prompt = "0123456789" * 20
    with Producer(client.url, queue=client.queue, hmac_key=keys or None) as producer:
        job = producer.submit(prompt=prompt, model="echo", max_tokens=200)
        with running_worker(worker_config(client.url, client.queue, model="echo:5")):
            eventually(lambda: client.generated(job.id) >= 20, "a checkpoint")
        client.redis.hset(f"pagemill:{{{client.queue}}}:job:{job.id}", "fingerprint", f"echo@{COMMIT}")
        with running_worker(worker_config(client.url, client.queue, model="echo:5")):
            result = job.result(timeout=120)
    assert result.text == prompt
    assert result.resumed_tokens >= 20
