"""A server that rejects every pull and every renewal, for a reason that does not resolve itself."""

from __future__ import annotations

import logging
import time

import pytest

from tests.worker.harness import QueueClient, eventually, get_json, running_worker, worker_config


@pytest.mark.slow
def test_a_refusal_that_stays_is_told_once_and_is_not_ready(
    client: QueueClient, caplog: pytest.LogCaptureFixture
) -> None:
    leases = f"pagemill:{{{client.queue}}}:leases"
    with running_worker(worker_config(client.url, client.queue)) as worker:
        eventually(lambda: get_json(f"{worker.http_url}/readyz")[0] == 200, "the worker to be ready")
        with caplog.at_level(logging.WARNING):
            client.redis.set(leases, "somebody else's")  # every script that reads leases fails on it
            eventually(lambda: get_json(f"{worker.http_url}/readyz")[0] == 503, "the worker to know")
            assert "WRONGTYPE" in get_json(f"{worker.http_url}/readyz")[1]["refusal"]
            time.sleep(4.0)
            told = [record for record in caplog.records if record.exc_info]
            assert {record.name.rpartition(".")[2] for record in told} == {"admission", "leases"}
            assert len(told) == 2, caplog.text
            client.redis.delete(leases)
        eventually(lambda: get_json(f"{worker.http_url}/readyz")[0] == 200, "the worker to pull again")
        (outcome,) = client.wait(client.submit({"prompt": "hello", "max_tokens": 5}))
        assert outcome.state == "succeeded"
