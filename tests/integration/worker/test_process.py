"""The worker as a process: its startup, its error messages, and its exit."""

from __future__ import annotations

import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import redis

from pagemill.producer.wire.server import discovery
from tests.conftest import RedisServer
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    get,
    get_json,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

Spawn = Callable[..., WorkerProcess]
LONG = {"prompt": "0123456789" * 200, "max_tokens": 2000}
"""Ten seconds of echo:5: not finished before a busy machine has checked."""
BRIEF = {"prompt": "0123456789" * 60, "max_tokens": 600}
"""Three seconds, where a test waits for the end."""


@pytest.fixture
def spawn(valkey_url: str, queue_name: str, tmp_path: Path) -> Iterator[Spawn]:
    """Start worker processes; remaining ones are killed at the end."""
    spawned: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        url = settings.pop("redis_url", valkey_url)
        process = WorkerProcess(
            process_settings(url, queue_name, **settings), tmp_path / f"worker-{len(spawned)}.log"
        )
        spawned.append(process)
        return process

    yield start
    for process in spawned:
        process.kill()


def start_running(
    spawn: Spawn, client: QueueClient, jobs: int = 1, job: dict[str, Any] = LONG, **settings: Any
) -> WorkerProcess:
    """A worker process with `jobs` such jobs that have started to generate."""
    process = spawn(**settings)
    ids = client.submit(*(job for _ in range(jobs)))
    for job_id in ids:
        eventually(lambda job_id=job_id: client.generated(job_id) > 0, "the first tokens")
    return process


def test_an_unreachable_redis_is_exit_3_with_a_message(spawn: Spawn) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{unused.getsockname()[1]}/0"
        process = spawn(redis_url=url)
        assert process.wait() == 3
    assert "Redis does not answer" in process.log()
    assert "Traceback" not in process.log()


def test_a_taken_port_is_exit_2_with_a_message(spawn: Spawn) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        process = spawn(http_port=taken.getsockname()[1])
        assert process.wait() == 2
    assert "is taken; choose another with --http-port" in process.log()


def test_a_server_that_may_lose_jobs_is_warned_about(own_valkey: RedisServer, spawn: Spawn) -> None:
    with redis.Redis(port=own_valkey.port) as admin:
        admin.config_set("maxmemory-policy", "allkeys-lru")
        admin.config_set("appendonly", "no")
    process = spawn(redis_url=own_valkey.url)
    eventually(lambda: "ready" in process.log(), "the worker to serve")
    assert "THIS REDIS MAY DELETE JOBS: its maxmemory-policy is allkeys-lru" in process.log()
    assert "THIS REDIS MAY LOSE JOBS" in process.log()


def test_without_a_url_a_server_is_started_and_found(spawn: Spawn, queue_name: str, tmp_path: Path) -> None:
    state_dir = tmp_path / "state"
    process = spawn(redis_url=None, state_dir=str(state_dir))
    eventually(lambda: "ready" in process.log(), "the worker to serve")
    assert "started the embedded Valkey at redis://127.0.0.1:" in process.log()
    client = QueueClient(discovery.find_redis(directory=state_dir), queue_name)
    ids = client.submit({"prompt": "found", "max_tokens": 5}, {"prompt": "later", "max_tokens": 5})
    assert client.wait(ids[:1])[0].state == "succeeded"
    client.wait(ids)
    client.redis.close()
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert not (state_dir / "server.json").exists()


def test_a_killed_embedded_server_comes_back_with_its_jobs(
    spawn: Spawn, queue_name: str, tmp_path: Path
) -> None:
    state_dir = tmp_path / "state"
    process = spawn(redis_url=None, state_dir=str(state_dir))
    eventually(lambda: "ready" in process.log(), "the worker to serve")
    client = QueueClient(discovery.find_redis(directory=state_dir), queue_name)
    ids = client.submit(*({"prompt": f"{i} " * 50, "max_tokens": 100} for i in range(20)))
    pid = client.redis.info("server")["process_id"]
    os.kill(pid, signal.SIGKILL)
    eventually(lambda: "has exited; restarting it" in process.log(), "the worker to notice")
    eventually(lambda: "Redis is back" in process.log(), "the worker to reconnect")
    client.redis.close()
    client = QueueClient(discovery.find_redis(directory=state_dir), queue_name)
    assert {outcome.state for outcome in client.wait(ids)} == {"succeeded"}
    client.redis.close()
    process.signal(signal.SIGTERM)
    assert process.wait() == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_the_first_signal_lets_running_jobs_finish(spawn: Spawn, client: QueueClient, number: int) -> None:
    process = start_running(spawn, client, jobs=2, job=BRIEF, drain_grace_s=120.0)
    process.signal(number)
    assert process.wait() == 0
    assert client.stats().counts["succeeded"] == 2
    assert client.workers() == []
    assert "requeued" not in process.log()


def test_a_draining_worker_is_live_but_not_ready_and_pulls_nothing(spawn: Spawn, client: QueueClient) -> None:
    job = {"prompt": "0123456789" * 120, "max_tokens": 1200}
    process = start_running(spawn, client, job=job, drain_grace_s=120.0)
    (info,) = client.workers()
    assert info.url is not None
    process.signal(signal.SIGTERM)
    eventually(lambda: get_json(f"{info.url}/readyz")[1]["state"] == "draining", "the drain")
    assert get(f"{info.url}/readyz")[0] == 503
    assert get(f"{info.url}/healthz")[0] == 200
    time.sleep(1.0)  # a pull in progress when the signal came
    (waiting,) = client.submit({"prompt": "later", "max_tokens": 5})
    assert process.wait() == 0
    assert client.status(waiting).state == "queued"


def test_after_the_grace_period_another_worker_goes_on_from_the_checkpoint(
    spawn: Spawn, client: QueueClient
) -> None:
    process = start_running(spawn, client, jobs=3, drain_grace_s=0.2)
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    stats = client.stats()
    assert stats.counts["queued"] == 3
    assert stats.leases == 0
    requeued = re.findall(r"job requeued .*job_id=(\w+)", process.log())
    assert len(requeued) == 3
    with running_worker(worker_config(client.url, client.queue)):
        eventually(lambda: client.stats().counts.get("succeeded") == 3, "the other worker to finish")
    for job_id in requeued:
        result = client.outcome(job_id).value()
        assert result is not None
        assert result.text == LONG["prompt"]
        assert result.resumed_tokens > 0
        status = client.status(job_id)
        assert (status.attempt, status.crashes) == (1, 0)


def test_a_second_signal_hurries(spawn: Spawn, client: QueueClient) -> None:
    process = start_running(spawn, client, drain_grace_s=600.0)
    process.signal(signal.SIGINT)
    eventually(lambda: "draining" in process.log(), "the drain to begin")
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert client.stats().counts["queued"] == 1


def test_a_drain_without_redis_ends_all_the_same(
    spawn: Spawn, own_valkey: RedisServer, queue_name: str
) -> None:
    client = QueueClient(own_valkey.url, queue_name)
    process = start_running(spawn, client, redis_url=own_valkey.url, drain_grace_s=0.1, shutdown_s=8.0)
    client.redis.close()
    own_valkey.kill()
    process.signal(signal.SIGTERM)
    assert process.wait() == 0
    assert "could not be requeued" in process.log()


def test_a_hung_engine_makes_the_process_exit_and_loses_its_leases(
    spawn: Spawn, client: QueueClient, valkey_url: str
) -> None:
    # A step of an hour, with a hang limit of half a second.
    (job_id,) = client.submit({"prompt": "h" * 10, "max_tokens": 10})
    process = spawn(model="echo:3600000", engine_stall_s=0.5)
    assert process.wait() == 1
    assert "the engine has got nowhere" in process.log()
    with running_worker(worker_config(valkey_url, client.queue, model="echo")):
        (outcome,) = client.wait([job_id])
    assert outcome.state == "succeeded"
    assert client.status(job_id).crashes == 1
