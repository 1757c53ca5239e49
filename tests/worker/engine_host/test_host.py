"""An engine behind its host, on a thread and in a separate process, with the echo engine."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pagemill.engine.errors import ConfigError
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.engine_host.messages import EngineState
from tests.worker.engine_host.carriers import HOSTS, Outputs, Start, make, request
from tests.worker.harness import PATIENCE_S, eventually


@pytest.fixture(params=HOSTS)
def start(request: pytest.FixtureRequest) -> Iterator[Start]:
    started: list[EngineHost] = []

    def start_engine(**options: object) -> tuple[EngineHost, Outputs]:
        engine, outputs = make(request.param, **options)
        started.append(engine)
        engine.start()
        return engine, outputs

    yield start_engine
    for engine in started:
        assert engine.stop(timeout=PATIENCE_S)


def test_requests_run_side_by_side_and_their_outputs_come_in_batches(start: Start) -> None:
    engine, outputs = start()
    engine.watch_blocks(60.0)  # a viewer does not wait for the model
    assert engine.wait_loaded(PATIENCE_S)
    for name in "ab":
        engine.add(request(name))
    for name in "ab":
        news = outputs.until_finished(name)
        tokens = [token for output in news for delta in output.deltas for token in delta.token_ids]
        assert tokens[:10] == [97] * 10
        assert [output.finished for output in news] == [False] * (len(news) - 1) + [True]
    assert eventually(lambda: engine.stats is not None and engine.stats.blocks, "the map of the blocks")


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
    engine.abort("long")  # an unknown id is not an error
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
