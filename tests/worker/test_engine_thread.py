"""The engine's carrier, with the echo engine."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import ConfigError
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_thread import AddRequest, EngineState, EngineThread
from tests.worker.harness import PATIENCE_S, eventually

Start = Callable[..., tuple[EngineThread, "Outputs"]]


class Outputs:
    """The engine's outputs, until a request's last one."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[list[RequestOutput]] = SimpleQueue()
        self.seen: list[RequestOutput] = []

    def until_finished(self, request_id: str) -> list[RequestOutput]:
        while not any(o.request_id == request_id and o.finished for o in self.seen):
            self.seen += self.queue.get(timeout=PATIENCE_S)
        return [output for output in self.seen if output.request_id == request_id]


@pytest.fixture
def start() -> Iterator[Start]:
    started: list[EngineThread] = []

    def start_engine(**options: object) -> tuple[EngineThread, Outputs]:
        outputs = Outputs()
        config = EngineConfig(**({"model": "echo"} | options))  # type: ignore[arg-type]
        engine = EngineThread(config, outputs.queue.put)
        started.append(engine)
        engine.start()
        return engine, outputs

    yield start_engine
    for engine in started:
        assert engine.stop(timeout=PATIENCE_S)


def request(request_id: str, length: int = 10) -> AddRequest:
    params = SamplingParams(max_tokens=length, seed=1)
    return AddRequest(request_id=request_id, prompt_token_ids=[97] * length, params=params)


def test_requests_run_side_by_side_and_their_outputs_come_in_batches(start: Start) -> None:
    engine, outputs = start()
    assert engine.wait_loaded(PATIENCE_S)
    for name in "ab":
        engine.add(request(name))
    for name in "ab":
        news = outputs.until_finished(name)
        tokens = [token for output in news for delta in output.deltas for token in delta.token_ids]
        assert tokens[:10] == [97] * 10
        assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]


def test_a_refused_request_comes_back_as_an_end_and_hurts_nobody(start: Start) -> None:
    engine, outputs = start(num_kv_blocks=4, block_size=4)
    assert engine.wait_loaded(PATIENCE_S)
    engine.add(request("too big", length=100))
    engine.add(request("fine", length=3))
    (refusal,) = outputs.until_finished("too big")
    assert refusal.error_code == "never_fits"
    assert outputs.until_finished("fine")[-1].error is None


def test_an_abort_ends_the_request_and_frees_its_blocks(start: Start) -> None:
    engine, outputs = start(model="echo:5")
    assert engine.wait_loaded(PATIENCE_S)
    engine.add(request("long", length=1000))
    eventually(lambda: not outputs.queue.empty(), "the first output")
    engine.abort("long")
    news = outputs.until_finished("long")
    assert [delta.finish_reason for delta in news[-1].deltas] in ([], ["abort"])
    eventually(lambda: engine.state is EngineState.IDLE and engine.stats.kv.active_blocks == 0, "idleness")
    engine.abort("long")  # an id that is gone is no trouble
    engine.add(request("next"))
    outputs.until_finished("next")


def test_a_held_engine_takes_requests_but_does_not_step(start: Start) -> None:
    engine, outputs = start()
    assert engine.wait_loaded(PATIENCE_S)
    engine.hold(True)
    engine.add(request("a"))
    eventually(lambda: engine.state is EngineState.HELD, "the hold")
    assert outputs.queue.empty()
    assert engine.stalled_for() == 0.0
    engine.hold(False)
    outputs.until_finished("a")


def test_a_model_that_cannot_be_loaded_raises_where_it_is_waited_for(start: Start) -> None:
    engine, _ = start(model="/no/such/model")
    with pytest.raises(ConfigError, match="/no/such/model"):
        engine.wait_loaded(PATIENCE_S)
    assert engine.state is EngineState.FAILED


def test_a_long_step_shows_as_a_stall_and_an_idle_engine_does_not(
    start: Start, monkeypatch: pytest.MonkeyPatch
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


def test_an_engine_that_raises_is_seen_at_once(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, _ = start()
    assert engine.wait_loaded(PATIENCE_S)

    def broken() -> list[RequestOutput]:
        raise MemoryError("the device is gone")

    monkeypatch.setattr(engine.engine, "step", broken)
    engine.add(request("a"))
    eventually(lambda: engine.state is EngineState.FAILED, "the failure to show")
    assert engine.stalled_for() == float("inf")
    assert isinstance(engine.error, MemoryError)
