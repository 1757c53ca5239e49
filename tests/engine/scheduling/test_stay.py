"""A breakdown of a request's time in the engine: each cause alone, with the echo model."""

from __future__ import annotations

import time

import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.outputs import StayCause
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.scheduling.stay import Occupancy, Stay

PROMPT = [*range(60, 100)] * 2
STEPS_OF_5_MS = "echo:5"


def echo(**options: object) -> Engine:
    return Engine.from_config(EngineConfig(model=STEPS_OF_5_MS, **options))  # type: ignore[arg-type]


def add(engine: Engine, name: str, tokens: int = 20, *, priority: int = 0, regex: str | None = None) -> None:
    shape = None if regex is None else StructuredOutputs(regex=regex)
    params = SamplingParams(max_tokens=tokens, ignore_eos=shape is None, structured_outputs=shape)
    engine.add_request(name, [ord(name), *PROMPT], params, priority=priority)


def run(engine: Engine) -> dict[str, dict[StayCause, int]]:
    """Step until all have finished; returns the breakdown of their time."""
    stays = {}
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                assert output.stay is not None
                stays[output.request_id] = output.stay
    return stays


@pytest.mark.parametrize(
    ("cause", "options"),
    [
        ("rows", {"max_num_seqs": 1}),
        ("kv", {"num_kv_blocks": 10}),
        ("budget", {"max_num_batched_tokens": 16}),
    ],
)
def test_what_a_request_waited_for_is_named(cause: StayCause, options: dict[str, object]) -> None:
    engine = echo(**options)
    add(engine, "a")
    add(engine, "b")
    stays = run(engine)
    assert cause not in stays["a"] or stays["a"][cause] < 20
    waited = {name: stays["b"].get(name, 0) for name in ("rows", "kv", "budget")}
    assert max(waited, key=waited.__getitem__) == cause
    assert waited[cause] >= 20


def test_the_prompt_and_the_output_are_told_apart_and_the_others_counted() -> None:
    engine = echo(max_num_batched_tokens=16)
    add(engine, "a")
    began = time.monotonic()
    alone = run(engine)["a"]
    took_ms = 1000 * (time.monotonic() - began)
    assert sum(alone.values()) - alone["others"] == pytest.approx(took_ms, abs=10)
    assert alone["prompt"] >= 4 * 5
    assert alone["decode"] >= 15 * 5
    assert alone["others"] <= 5
    engine = echo()
    for name in "abc":
        add(engine, name)
    assert all(10 <= stay["others"] <= 30 for stay in run(engine).values())


def test_a_request_that_gives_its_row_to_an_urgent_one_was_displaced() -> None:
    engine = echo(max_num_seqs=2)
    add(engine, "a", 60, priority=1)
    add(engine, "b", 60, priority=1)
    for _ in range(20):
        engine.step()
    add(engine, "u", priority=-1)
    stays = run(engine)
    assert stays["b"]["displaced"] >= 15 * 5
    assert "displaced" not in stays["a"] | stays["u"]
    assert "preempted" not in stays["b"]


def test_a_request_that_loses_its_blocks_was_preempted() -> None:
    engine = echo(num_kv_blocks=15)
    add(engine, "a", 60)
    add(engine, "b", 60)
    stays = run(engine)
    assert engine.stats().scheduler.preemptions
    assert stays["b"]["preempted"] >= 20


@pytest.mark.slow
def test_a_grammar_is_waited_for() -> None:
    engine = echo()
    add(engine, "a", regex="[a-z]{3}")
    assert run(engine)["a"]["grammar"] >= 20, "a process starts for the first schema"


def test_an_adapter_that_is_not_in_memory_is_waited_for() -> None:
    stay = Stay()
    time.sleep(0.02)
    stay.enter("grammar")
    stay.wait(Occupancy())
    stay.admitted()
    report = stay.report(1, time.monotonic())
    assert report["adapter"] >= 20
    assert sum(report.values()) == report["adapter"]
