"""The probes' responses, and the exit of a worker that hangs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pagemill.engine.engine import Engine
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.worker.jobs import leases
from pagemill.worker.signal_flag import SignalFlag
from pagemill.worker.worker import Worker
from tests.conftest import RedisServer
from tests.worker.harness import PATIENCE_S, QueueClient, eventually, get_json, running_worker, worker_config

_HOLDS_THE_LOCK = """
import ctypes, sys
from pagemill.engine.models.echo import EchoRunner
from pagemill.worker.config import WorkerConfig
from pagemill.worker.process import run_worker

def launch(self, plan):
    ctypes.PyDLL(None).sleep(600)  # native code that keeps the interpreter lock

EchoRunner.launch = launch
url, queue = sys.argv[1:]
settings = dict(lease_s=1.5, renew_s=0.3, http_port=0, engine_stall_s=1.0)
sys.exit(run_worker(WorkerConfig.load(redis_url=url, queue=queue, model="echo", **settings)))
"""

_NO_SUCH_MODEL = """
import sys
from pagemill.__main__ import app
try:
    app(["worker", "--model", "/no/such/model", "--state-dir", sys.argv[1]])
except SystemExit as ended:
    print(ended.code, "torch" in sys.modules)
"""


def probe(worker: Worker, name: str) -> tuple[int, dict[str, Any]]:
    return get_json(f"{worker.http_url}/{name}")


@pytest.mark.slow
def test_a_worker_that_loads_is_alive_but_neither_started_nor_ready(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_load = threading.Event()
    load: Callable[..., Engine] = Engine.from_config

    def slowly(config: Any) -> Engine:
        may_load.wait(PATIENCE_S)
        return load(config)

    monkeypatch.setattr(Engine, "from_config", slowly)
    worker = Worker(worker_config(client.url, client.queue, engine_stall_s=0.2), client.url)
    try:
        worker.start()
        assert not worker.wait_ready(timeout=0.5), "it takes longer than a step may"
        status, started = probe(worker, "startupz")
        assert (status, started["state"]) == (503, "loading")
        assert probe(worker, "readyz")[0] == 503
        assert probe(worker, "healthz")[0] == 200, "a long load is no hang"
        may_load.set()
        assert worker.wait_ready(PATIENCE_S)
        assert [probe(worker, name)[0] for name in ("startupz", "healthz")] == [200] * 2
        eventually(lambda: probe(worker, "readyz")[0] == 200, "its registration")
    finally:
        may_load.set()
        worker.drain(0.0, SignalFlag(), time.monotonic() + 20)
        assert worker.close()


@pytest.mark.slow
def test_a_worker_is_not_ready_before_clients_can_find_it(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    may_register = threading.Event()
    heartbeat = leases.heartbeat

    def late(queue: str, info: WorkerInfo) -> Any:
        if info.state == "ready":
            may_register.wait(PATIENCE_S)
        return heartbeat(queue, info)

    monkeypatch.setattr(leases, "heartbeat", late)
    worker = Worker(worker_config(client.url, client.queue, lease_s=300.0), client.url)
    try:
        worker.start()
        assert worker.wait_ready(PATIENCE_S)
        status, found = probe(worker, "readyz")
        assert (status, found["state"], found["registered"]) == (503, "ready", False)
        may_register.set()
        eventually(lambda: probe(worker, "readyz")[0] == 200, "its registration")
        assert [info.models for info in client.workers()] == [("echo",)]
    finally:
        may_register.set()
        worker.drain(0.0, SignalFlag(), time.monotonic() + 20)
        assert worker.close()


@pytest.mark.slow
def test_a_step_that_takes_too_long_fails_the_probe_until_it_ends(
    client: QueueClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = worker_config(client.url, client.queue, engine_stall_s=0.5, lease_s=300.0)
    end = threading.Event()
    with running_worker(config) as worker:
        executor = worker.engine.engine._parts.executor
        launch = executor.launch
        monkeypatch.setattr(executor, "launch", lambda plan: (end.wait(PATIENCE_S), launch(plan))[1])
        assert probe(worker, "healthz")[0] == 200, "nothing to do is no hang"
        client.submit({"prompt": "a", "max_tokens": 1})
        eventually(lambda: probe(worker, "healthz")[0] == 503, "the probe to fail")
        _, told = probe(worker, "healthz")
        assert (told["running"], told["stall_limit_s"]) == (1, 0.5)
        assert "got nowhere" in told["reason"]
        assert probe(worker, "readyz")[0] == 503
        assert probe(worker, "startupz")[0] == 200, "it did start"
        end.set()
        eventually(lambda: probe(worker, "healthz")[0] == 200, "the step to end")


@pytest.mark.slow
def test_redis_away_is_not_ready_and_alive(own_valkey: RedisServer, queue_name: str) -> None:
    with running_worker(worker_config(own_valkey.url, queue_name)) as worker:
        own_valkey.kill()
        eventually(lambda: probe(worker, "readyz")[0] == 503, "the outage to be noticed")
        assert (probe(worker, "readyz")[1]["redis"], probe(worker, "healthz")[0]) == ("away", 200)
        own_valkey.start()
        eventually(lambda: probe(worker, "readyz")[0] == 200, "the server's return")


@pytest.mark.slow
def test_native_code_that_stops_every_thread_ends_the_process(client: QueueClient, valkey_url: str) -> None:
    """No thread of the process is left to notice: the exit must not need the interpreter."""
    (job_id,) = client.submit({"prompt": "a", "max_tokens": 4})
    command = [sys.executable, "-c", _HOLDS_THE_LOCK, valkey_url, client.queue]
    hung = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert hung.returncode == 1, hung.stderr
    assert "Timeout" in hung.stderr
    assert "in launch" in hung.stderr, "it prints where every thread stands"
    with running_worker(worker_config(valkey_url, client.queue)):
        (outcome,) = client.wait([job_id])
    assert outcome.state == "succeeded"


@pytest.mark.slow
def test_a_wrong_model_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    state = tmp_path / "state"
    command = [sys.executable, "-c", _NO_SUCH_MODEL, str(state)]
    refused = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert refused.stdout.split() == ["2", "False"], refused.stderr
    assert "no model at '/no/such/model'" in refused.stderr
    assert not state.exists(), "no server was started for it"
