"""An engine in a separate process: its crash, its hang, and the crash of its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from pagemill.engine.errors import DeviceLost, EngineError
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.engine_host.process import EngineProcess
from tests.worker.engine_host.carriers import Outputs, make, request
from tests.worker.harness import PATIENCE_S, eventually

PARENT = """
import time
from pagemill.engine.config import EngineConfig
from pagemill.worker.engine_host.process import EngineProcess
if __name__ == "__main__":
    engine = EngineProcess(EngineConfig(model={model!r}), lambda outputs: None)
    engine.start()
    while engine.pid is None or ({waits} and not engine.wait_loaded(0.1)):
        time.sleep(0.01)
    print(engine.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def running() -> Iterator[tuple[EngineProcess, Outputs]]:
    """A slow engine with a running request."""
    engine, outputs = make("process", model="echo:5")
    assert isinstance(engine, EngineProcess)
    engine.start()
    assert engine.wait_loaded(PATIENCE_S)
    engine.add(request("long", length=2000))
    eventually(lambda: not outputs.queue.empty(), "the first output")
    yield engine, outputs
    assert engine.stop(timeout=PATIENCE_S)


def test_a_killed_process_is_a_lost_device(running: tuple[EngineProcess, Outputs]) -> None:
    engine, outputs = running
    engine.add(request("brief", length=2))
    outputs.until_finished("brief")
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGKILL)
    eventually(lambda: engine.state is EngineState.FAILED, "the death to be seen")
    assert isinstance(engine.error, DeviceLost)
    assert "the engine's process was ended by SIGKILL" in str(engine.error)
    assert engine.error.request_ids == {"long"}, "what has ended can't have been the cause"
    assert engine.stalled_for() == float("inf")
    assert not engine.is_alive


@pytest.mark.slow
def test_a_process_that_stands_still_stalls_and_is_killed_in_the_end(
    running: tuple[EngineProcess, Outputs],
) -> None:
    engine, _ = running
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    eventually(lambda: engine.stalled_for() > 0.3, "the stall to show")
    engine.abort("long")
    assert engine.stop(timeout=0.2)
    assert not psutil.pid_exists(engine.pid)


@pytest.mark.slow
def test_an_idle_process_that_takes_no_commands_stalls() -> None:
    engine, outputs = make("process")
    assert isinstance(engine, EngineProcess)
    engine.start()
    assert engine.wait_loaded(PATIENCE_S)
    assert engine.pid is not None
    os.kill(engine.pid, signal.SIGSTOP)
    assert engine.stalled_for() == 0.0
    engine.add(request("a"))
    assert eventually(lambda: engine.stalled_for() > 0.3, "the stall to show")
    os.kill(engine.pid, signal.SIGCONT)
    outputs.until_finished("a")
    eventually(lambda: engine.stalled_for() == 0.0, "the engine to be idle")
    assert engine.stop(timeout=PATIENCE_S)
    assert engine.state is EngineState.STOPPED


def test_signals_to_the_whole_service_are_the_workers_to_answer(
    running: tuple[EngineProcess, Outputs],
) -> None:
    engine, outputs = running
    assert engine.pid is not None
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        os.kill(engine.pid, number)
    engine.add(request("after", length=3))
    assert outputs.until_finished("after")[-1].error is None


def test_a_process_that_cannot_be_started_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = make("process")
    monkeypatch.setattr(sys, "executable", "/no/such/python")
    engine.start()
    with pytest.raises(EngineError, match=r"the engine's process can't be started: .*/no/such/python"):
        engine.wait_loaded(PATIENCE_S)
    assert engine.stop(timeout=PATIENCE_S)


def test_loading_ends_with_the_worker_that_asked_for_it() -> None:
    engine, _ = make("process", model="smollm2", num_kv_blocks=64)
    assert isinstance(engine, EngineProcess)
    engine.start()
    eventually(lambda: engine.pid is not None, "the process")
    time.sleep(0.5)
    assert engine.stop(timeout=PATIENCE_S)
    assert engine.pid is not None
    assert not psutil.pid_exists(engine.pid)


ON_LINUX = pytest.mark.skipif(sys.platform != "linux", reason="the kernel's help is Linux's")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("waits", "is_stopped"),
    [(True, False), (False, False), pytest.param(True, True, marks=ON_LINUX)],
    ids=["serving", "starting", "standing still"],
)
def test_no_process_outlives_its_worker(tmp_path: Path, waits: bool, is_stopped: bool) -> None:
    script = tmp_path / "parent"
    script.write_text(PARENT.format(model="echo:5", waits=waits))
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = psutil.Process(int(parent.stdout.readline()))
        if is_stopped:
            child.suspend()
        parent.kill()
        parent.wait()
    eventually(lambda: not child.is_running() or child.status() == psutil.STATUS_ZOMBIE, "the child's end")
