"""`pagemill workers drain | pause | resume` on real workers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from typer.testing import CliRunner

from pagemill import Producer
from pagemill.__main__ import app
from pagemill.producer.wire.calls import registry
from tests.producer.driving import open_queue
from tests.worker.harness import eventually, get, running_worker, worker_config

pytestmark = pytest.mark.slow

SLOW = "echo:50"
"""50 ms per token: a job of 2,000 tokens outlasts the test."""


def command(url: str, queue: str, *words: str) -> tuple[int, Any]:
    run = CliRunner().invoke(app, ["workers", *words, "--redis-url", url, "--queue", queue, "--json"])
    return run.exit_code, json.loads(run.stdout)


def test_a_drained_worker_hands_its_jobs_to_another_and_resumes(valkey_url: str, queue_name: str) -> None:
    config = worker_config(valkey_url, queue_name, model=SLOW, drain_grace_s=0.3)
    queue = open_queue(valkey_url, queue_name)
    with (
        running_worker(config) as first,
        Producer(valkey_url, queue=queue_name) as producer,
    ):
        long = producer.submit(prompt="p" * 2000, model="echo", max_tokens=2000)
        eventually(lambda: long.status().progress is not None, "its progress")
        code, drained = command(valkey_url, queue_name, "drain", first.worker_id[:-2])
        assert (code, drained["workers"]) == (
            0,
            {first.worker_id: {"state": "drained", "running": 0, "error": None}},
        )
        assert long.status().state == "queued"
        assert get(f"{first.http_url}/readyz")[0] == 503
        assert get(f"{first.http_url}/healthz")[0] == 200, "nobody restarts it"
        (listed,) = command(valkey_url, queue_name)[1]
        assert listed["state"] == "drained"
        with running_worker(config) as second:
            eventually(lambda: long.status().worker == second.worker_id, "another worker")
            assert long.status().attempt == 1, "a job that was requeued counts no attempt"
            quick = producer.submit(prompt="q", model="echo", max_tokens=2)
            assert quick.result(60).usage is not None
            assert quick.status().worker == second.worker_id
            code, _ = command(valkey_url, queue_name, "pause", second.worker_id)
            assert code == 0
            eventually(lambda: second.admission.blocked == "paused", "the worker to notice")
            waiting = producer.submit(prompt="r", model="echo", max_tokens=2)
            assert command(valkey_url, queue_name, "resume", first.worker_id)[0] == 0
            waiting.result(60)
            assert waiting.status().worker == first.worker_id
            assert long.status().state == "running", "a pause leaves what runs alone"
            states = {one.id: one.state for one in queue.run(registry.workers(queue_name))}
            assert states == {first.worker_id: "ready", second.worker_id: "paused"}
            assert command(valkey_url, queue_name, "resume", "--all")[0] == 0
        long.cancel()


def test_ids_that_name_no_worker_or_several_are_refused(valkey_url: str, queue_name: str) -> None:
    def said(*words: str) -> str:
        run = CliRunner().invoke(app, ["workers", *words, "--redis-url", valkey_url, "--queue", queue_name])
        assert run.exit_code == 2
        return " ".join(run.stderr.split())

    config = worker_config(valkey_url, queue_name)
    assert "no worker is alive" in said("drain", "--all")
    with running_worker(config) as first, running_worker(config):
        assert "no live worker of queue" in said("drain", "nobody")
        assert "pagemill workers --queue" in said("pause", "nobody")
        assert "is not unique" in said("resume", first.worker_id[:3])
        assert "specify ids of workers, or --all" in said("drain")
        assert "specify ids of workers, or --all" in said("drain", "--all", first.worker_id)
