"""The engine of vectors and scores: batches, order, aborts and failures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModel

from pagemill.engine.builder import describe_model
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.backend import HostCopy
from pagemill.engine.engine import Engine
from pagemill.engine.errors import ConfigError, DeviceLost, InvalidRequest
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.pooling.engine import PoolingEngine
from pagemill.engine.pooling.input_processor import PARAMS, PoolInput
from pagemill.engine.serving import load_engine
from pagemill.engine.tasks import Pool
from tests.engine.pooling.tiny_pooling import ENCODERS, engine_of, run, save_base, texts_of_all_lengths

TEXTS = texts_of_all_lengths()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bert")
    save_base(directory, ENCODERS["bert"], AutoModel)
    return directory


def add(engine: PoolingEngine, name: str, texts: list[Any], **options: Any) -> None:
    token_ids, params, task = engine.input_processor.process_pool(PoolInput(kind="embed", texts=texts))
    engine.add_request(name, token_ids, params, task=task, **options)


def finished(outputs: list[RequestOutput]) -> list[str]:
    return [output.request_id for output in outputs if output.finished]


def test_company_changes_nothing(model: Path) -> None:
    alone = [run(engine_of(model), "embed", [text])[0] for text in TEXTS[:8]]
    together = run(engine_of(model, max_num_batched_tokens=64), "embed", TEXTS)
    assert np.abs(np.stack(alone) - together[:8]).max() < 1e-5


def test_a_batch_keeps_to_its_budget(model: Path) -> None:
    engine = engine_of(model, max_num_batched_tokens=64)
    for number, text in enumerate(TEXTS):
        add(engine, str(number), [text])
    ended: list[str] = []
    while engine.has_unfinished():
        before = engine.stats().steps.computed_tokens
        ended += finished(engine.step())
        assert 0 < engine.stats().steps.computed_tokens - before <= 64
    assert sorted(ended, key=int) == [str(number) for number in range(len(TEXTS))]
    stats = engine.stats()
    assert stats.requests.finished["stop"] == len(TEXTS)
    assert stats.requests.pooled_texts == {"embed": len(TEXTS), "classify": 0, "rerank": 0}
    assert stats.requests.prompt_tokens_by_source["computed"] == stats.requests.prompt_tokens
    assert engine.capacity().free_rows == engine.limits.max_num_seqs


def test_priority_comes_before_arrival(model: Path) -> None:
    engine = engine_of(model, max_num_batched_tokens=8)
    add(engine, "late", ["w1 w2 w3 w4"], priority=0, arrival=2.0)
    add(engine, "early", ["w1 w2 w3 w4"], priority=0, arrival=1.0)
    add(engine, "urgent", ["w1 w2 w3 w4"], priority=-1, arrival=3.0)
    assert [finished(engine.step()) for _ in range(3)] == [["urgent"], ["early"], ["late"]]


def test_one_can_be_aborted(model: Path) -> None:
    engine = engine_of(model, max_num_batched_tokens=32)
    add(engine, "gone", TEXTS)
    add(engine, "stays", ["w1"])
    (progress,) = engine.step()
    assert 0 < progress.prompt_tokens_done < progress.prompt_tokens
    (end,) = engine.abort("gone")
    assert (end.finished, end.pooled, end.deltas[0].finish_reason) == (True, None, "abort")
    assert engine.abort("gone") == []
    assert finished(engine.step()) == ["stays"]
    assert not engine.has_unfinished()


def test_the_next_batch_starts_before_the_last_one_has_ended(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_num_batched_tokens=64, async_scheduling=True)
    seen: list[str] = []
    launch, wait = type(engine._model).launch, HostCopy.wait
    monkeypatch.setattr(type(engine._model), "launch", lambda *a: seen.append("launch") or launch(*a))
    monkeypatch.setattr(HostCopy, "wait", lambda copy: seen.append("wait") or wait(copy))
    rows = run(engine, "embed", TEXTS)
    assert seen[:4] == ["launch", "launch", "wait", "launch"]
    assert np.array_equal(rows, run(engine_of(model, max_num_batched_tokens=64), "embed", TEXTS))
    assert not engine.has_unfinished()


def test_a_request_can_end_while_two_batches_have_its_texts(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(model, max_num_batched_tokens=4, async_scheduling=True)
    texts = ["w1 w2", "w3 w4", "w5 w6"]
    for name in ("gone", "bad", "stays"):
        add(engine, name, texts)
    assert engine.step() == []
    (end,) = engine.abort("gone")
    assert end.finished
    first = engine._requests["bad"]
    launch = type(engine._model).launch

    def not_finite(self: Any, batch: Any, *rest: Any) -> HostCopy:
        copy = launch(self, batch, *rest)
        is_bad = engine._requests.get("bad") is first
        return HostCopy([copy.hosts[0] * float("nan")]) if is_bad else copy

    monkeypatch.setattr(type(engine._model), "launch", not_finite)
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert {output.request_id for output in outputs if output.finished} == {"bad", "stays"}
    assert {output.error_code for output in outputs if output.request_id == "bad" and output.finished} == {
        "output_invalid"
    }


def test_a_batch_that_raises_runs_again_one_by_one(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)
    launch = type(engine._model).launch

    def fails_for_nines(self: Any, batch: Any, *rest: Any) -> Any:
        if 9 in batch.token_ids:
            raise RuntimeError("no nines")
        return launch(self, batch, *rest)

    monkeypatch.setattr(type(engine._model), "launch", fails_for_nines)
    for name, text in (("a", [1, 4, 2]), ("bad", [1, 9, 2]), ("b", [1, 5, 2])):
        add(engine, name, [text])
    outputs: list[RequestOutput] = []
    while engine.has_unfinished():
        outputs += engine.step()
    codes = {output.request_id: output.error_code for output in outputs if output.finished}
    assert codes == {"a": None, "b": None, "bad": "engine_error"}
    assert engine.stats().scheduler.steps_failed >= 2


def test_a_lost_device_ends_the_engine(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(model)

    def dies(*_: Any) -> Any:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(type(engine._model), "launch", dies)
    add(engine, "one", ["w1"])
    for _ in range(2):
        with pytest.raises(DeviceLost) as lost:
            engine.step()
        assert lost.value.request_ids == {"one"}


def test_what_no_processor_prepared_is_refused(model: Path) -> None:
    engine = engine_of(model)
    add(engine, "one", ["w1"])
    for name, task in (
        ("one", Pool(kind="embed", lengths=(1,), width=32)),
        ("two", Pool(kind="embed", lengths=(2,), width=32)),
    ):
        with pytest.raises(InvalidRequest):
            engine.add_request(name, [1], PARAMS, task=task)
    with pytest.raises(InvalidRequest):
        engine.add_request("three", [1], PARAMS)


def test_settings_that_mean_nothing_here_are_refused(model: Path) -> None:
    for settings in ({"batch_invariant": True}, {"tensor_parallel_size": 2}, {"load_format": "dummy"}):
        with pytest.raises(ConfigError, match="a model for vectors or scores has no such setting"):
            engine_of(model, **settings)


def test_the_doctor_is_told_what_it_is(model: Path) -> None:
    assert describe_model(EngineConfig(model=str(model))).startswith("gives vectors or labels")


def test_a_generating_model_gets_the_other_engine() -> None:
    assert isinstance(load_engine(EngineConfig(model="echo")), Engine)
