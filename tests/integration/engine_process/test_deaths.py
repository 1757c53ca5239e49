"""A worker whose engine has a separate process: either one crashes or hangs, and no job is lost."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemill.producer.wire.calls import transitions
from tests.conftest import ROOT
from tests.worker.harness import (
    QueueClient,
    WorkerProcess,
    eventually,
    process_settings,
    running_worker,
    worker_config,
)

pytestmark = pytest.mark.slow

Spawn = Callable[..., WorkerProcess]
LONG = {"prompt": "0123456789" * 150, "max_tokens": 1500, "max_attempts": 1}
BRIEF = {"prompt": "0123456789" * 40, "max_tokens": 400}
FAULTY = """
import os
if "engine_host.child" in " ".join(os.sys.orig_argv):
    from pagemill.engine.models.echo import EchoRunner
    launch = EchoRunner.launch
    dead = False
    def faulty_launch(self, plan):
        global dead
        dead = dead or any(9 in row.token_ids for row in plan.new_rows)
        if dead:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return launch(self, plan)
    EchoRunner.launch = faulty_launch
"""
"""On the import path of every process, and active in an engine's: the byte 9 kills the device."""


@pytest.fixture
def spawn(valkey_url: str, queue_name: str, tmp_path: Path) -> Iterator[Spawn]:
    spawned: list[WorkerProcess] = []

    def start(**settings: Any) -> WorkerProcess:
        given = process_settings(valkey_url, queue_name, engine_process="on", **settings)
        spawned.append(WorkerProcess(given, tmp_path / f"worker-{len(spawned)}.log"))
        return spawned[-1]

    yield start
    for process in spawned:
        process.kill()


def engine_of(worker: WorkerProcess) -> psutil.Process:
    """The engine's process of a worker's process."""
    children = psutil.Process(worker.process.pid).children()
    (engine,) = [child for child in children if "engine_host.child" in " ".join(child.cmdline())]
    return engine


def is_gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def start_running(
    spawn: Spawn, client: QueueClient, job: dict[str, Any] = LONG, **settings: Any
) -> tuple[WorkerProcess, list[str]]:
    worker = spawn(**settings)
    ids = client.submit(*[job] * 3)
    for job_id in ids:
        eventually(lambda job_id=job_id: client.generated(job_id) > 0, "tokens on record")
    return worker, ids


def finish_elsewhere(client: QueueClient, ids: list[str]) -> None:
    """Another worker, with its engine on a thread, resumes from the checkpoints."""
    with running_worker(worker_config(client.url, client.queue)):
        for job_id, outcome in zip(ids, client.wait(ids), strict=True):
            result = outcome.value()
            assert result is not None
            assert result.text == LONG["prompt"]
            assert result.resumed_tokens > 0
            assert client.status(job_id).attempt == 1


def test_a_killed_engine_ends_the_worker_and_its_jobs_go_on_elsewhere(
    spawn: Spawn, client: QueueClient
) -> None:
    worker, ids = start_running(spawn, client)
    engine_of(worker).kill()
    assert worker.wait() == 1
    assert "the engine's process was ended by SIGKILL" in worker.log()
    assert len(re.findall("may have killed the device", worker.log())) == 3
    finish_elsewhere(client, ids)


def test_a_killed_worker_takes_its_engine_along(spawn: Spawn, client: QueueClient) -> None:
    worker, ids = start_running(spawn, client)
    engine = engine_of(worker)
    worker.kill()
    eventually(lambda: is_gone(engine), "the engine's end")
    finish_elsewhere(client, ids)


def test_an_engine_that_stands_still_is_a_hang_and_is_killed(spawn: Spawn, client: QueueClient) -> None:
    worker, ids = start_running(spawn, client, engine_stall_s=1.0)
    engine = engine_of(worker)
    engine.suspend()
    assert worker.wait() == 1
    assert "the engine has got nowhere" in worker.log()
    eventually(lambda: is_gone(engine), "the engine's end")
    finish_elsewhere(client, ids)


def test_a_device_that_dies_in_the_engine_s_process_blames_the_jobs_of_its_steps_alone(
    spawn: Spawn, client: QueueClient, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (faults := tmp_path / "faults").mkdir()
    (faults / "sitecustomize.py").write_text(FAULTY)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(faults), str(ROOT)]))
    worker, ids = start_running(spawn, client, max_num_batched_tokens=64)
    (poison,) = client.submit({"prompt": "\x09", "max_tokens": 1, "priority": "high", "max_attempts": 1})
    assert worker.wait() == 1
    assert "DeviceLost('the device is lost: RuntimeError: CUDA error" in worker.log()
    assert "Traceback" in worker.log(), "where it happened"
    client.run(transitions.sweep(client.queue))
    assert client.status(poison).crashes == 1
    monkeypatch.undo()
    finish_elsewhere(client, ids)
    client.wait([poison])


def test_a_signal_to_all_processes_of_a_service_drains(spawn: Spawn, client: QueueClient) -> None:
    worker, ids = start_running(spawn, client, job=BRIEF, drain_grace_s=120.0)
    engine = engine_of(worker)
    for process in (engine, psutil.Process(worker.process.pid)):
        process.send_signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert client.stats().counts["succeeded"] == len(ids)
    assert is_gone(engine)


def test_after_the_grace_period_jobs_are_requeued(spawn: Spawn, client: QueueClient) -> None:
    worker, ids = start_running(spawn, client, drain_grace_s=0.1)
    worker.signal(signal.SIGTERM)
    assert worker.wait() == 0
    assert client.stats().counts["queued"] == len(ids)
    assert client.stats().leases == 0
    finish_elsewhere(client, ids)
    assert {client.status(job_id).crashes for job_id in ids} == {0}


def test_a_refused_model_is_one_line(spawn: Spawn, tmp_path: Path) -> None:
    (model := tmp_path / "model").mkdir()
    (model / "config.json").write_text('{"model_type": "llama", "hidden_size": "wide"}')
    worker = spawn(model=str(model))
    assert worker.wait() == 2
    assert "Traceback" not in worker.log()
    assert f"can't read {model}/config.json" in worker.log().splitlines()[-1]
