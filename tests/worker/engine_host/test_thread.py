"""Cases that only an engine on a thread can show: its steps are replaced here."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator

import pytest

from pagemill.engine.outputs import RequestOutput
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.engine_host.thread import EngineThread
from tests.worker.engine_host.carriers import Outputs, make, request
from tests.worker.harness import PATIENCE_S, eventually

StartThread = Callable[[], tuple[EngineThread, Outputs]]


@pytest.fixture
def start() -> Iterator[StartThread]:
    started: list[EngineThread] = []

    def start_engine() -> tuple[EngineThread, Outputs]:
        engine, outputs = make("thread")
        assert isinstance(engine, EngineThread)
        started.append(engine)
        engine.start()
        return engine, outputs

    yield start_engine
    for engine in started:
        assert engine.stop(timeout=PATIENCE_S)


def test_a_long_step_shows_as_a_stall_and_an_idle_engine_does_not(
    start: StartThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, outputs = start()
    assert engine.wait_loaded(PATIENCE_S)
    time.sleep(0.1)
    assert engine.stalled_for() == 0.0
    end = threading.Event()
    step = engine.engine.step
    monkeypatch.setattr(engine.engine, "step", lambda: (end.wait(PATIENCE_S), step())[1])
    engine.add(request("slow", length=1))
    assert eventually(lambda: engine.stalled_for() > 0.3, "the step to take its time")
    end.set()
    outputs.until_finished("slow")
    eventually(lambda: engine.stalled_for() == 0.0, "the engine to be idle")


def test_an_engine_that_raises_is_seen_at_once(start: StartThread, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start()
    assert engine.wait_loaded(PATIENCE_S)

    def broken() -> list[RequestOutput]:
        raise MemoryError("the device is gone")

    monkeypatch.setattr(engine.engine, "step", broken)
    engine.add(request("a"))
    eventually(lambda: engine.state is EngineState.FAILED, "the failure to show")
    assert engine.stalled_for() == float("inf")
    assert isinstance(engine.error, MemoryError)
