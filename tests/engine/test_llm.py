"""The engine from prompts to text: shapes, rejections, stop strings, aborts, failing steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.builder import build_parts
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.llm import LLM
from pagemill.engine.models.echo import EchoRunner, EchoStep
from pagemill.engine.outputs import RequestOutput
from pagemill.engine.plan import StepPlan, StepResult
from pagemill.engine.sampling_params import SamplingParams


@pytest.fixture(params=[False, True], ids=["depth 0", "depth 1"])
def llm(request: pytest.FixtureRequest) -> LLM:
    return LLM("echo", async_scheduling=request.param)


def params(**options: Any) -> SamplingParams:
    return SamplingParams(**({"max_tokens": 100} | options))


def texts(llm: LLM, prompts: Any, sampling: Any = None) -> list[list[str]]:
    results = llm.generate(prompts, sampling or params(), use_tqdm=False)
    return [[output.text for output in result.outputs] for result in results]


def test_results_come_in_the_order_of_the_prompts(llm: LLM) -> None:
    prompts = ["a long prompt", "b", "c" * 40]
    results = llm.generate(prompts, params(), use_tqdm=False)
    assert [result.prompt for result in results] == prompts
    assert [result.outputs[0].text for result in results] == prompts
    assert [result.outputs[0].token_ids for result in results] == [[*p.encode(), 256] for p in prompts]
    assert {result.outputs[0].finish_reason for result in results} == {"stop"}
    assert [result.usage.prompt_tokens for result in results] == [13, 1, 40]
    assert [result.usage.completion_tokens for result in results] == [14, 2, 41]
    assert all(result.error is None for result in results)
    assert llm.engine.stats().requests.finished["stop"] == 3


def test_one_prompt_stands_for_a_list_of_one(llm: LLM) -> None:
    assert texts(llm, "abc") == texts(llm, ["abc"]) == [["abc"]]
    assert texts(llm, [97, 98]) == texts(llm, [[97, 98]]) == [["ab"]]
    assert texts(llm, []) == []


@pytest.mark.parametrize(
    "prompts",
    [
        np.array([97, 98]), np.array([[97, 98]], dtype=np.uint16), torch.tensor([[97, 98]]),
        [np.array([97, 98])], [np.int64(97), np.int64(98)], ((97, 98),), {"prompt_token_ids": [97, 98]},
        [{"prompt_token_ids": np.array([97, 98]), "prompt": None}], {"prompt": "ab"}, np.array(["ab"]),
        ("ab",),
    ],
    ids=repr,
)  # fmt: skip
def test_prompts_of_other_types(llm: LLM, prompts: Any) -> None:
    assert texts(llm, prompts) == [["ab"]]
    assert texts(llm, (text for text in ["ab"])) == [["ab"]]


@pytest.mark.parametrize(
    "prompts",
    [None, 5, [None], ["a", 5], {}, {"prompt": 5}, {"prompt": "a", "image": b""}, [1.5]],
    ids=repr,
)
def test_other_types_are_refused_before_anything_ran(llm: LLM, prompts: Any) -> None:
    with pytest.raises(TypeError, match="prompt"):
        llm.generate(prompts, params(), use_tqdm=False)
    with pytest.raises(TypeError, match=r"SamplingParams\(\*\*params\)"):
        llm.generate("a", {"max_tokens": 3}, use_tqdm=False)  # type: ignore[arg-type]


def test_max_tokens_is_16_unless_said_otherwise(llm: LLM) -> None:
    (result,) = llm.generate("x" * 40, use_tqdm=False)
    assert (result.outputs[0].text, result.outputs[0].finish_reason) == ("x" * 16, "length")


def test_each_prompt_may_have_its_own_parameters(llm: LLM) -> None:
    assert texts(llm, ["abc", "def"], [params(max_tokens=1), params(max_tokens=2)]) == [["a"], ["de"]]
    with pytest.raises(ValueError, match="1 sampling_params for 2 prompts"):
        llm.generate(["abc", "def"], [params()])


def test_n_samples_share_a_prompt(llm: LLM) -> None:
    (result,) = llm.generate("x" * 40, params(n=3), use_tqdm=False)
    assert [output.index for output in result.outputs] == [0, 1, 2]
    assert [output.text for output in result.outputs] == ["x" * 40] * 3
    assert result.usage.prompt_tokens == 40
    assert result.usage.completion_tokens == 3 * 41


def test_chat_writes_until_the_model_ends_it(llm: LLM) -> None:
    first = [{"role": "user", "content": "x" * 40}]
    second = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    assert [r.outputs[0].text for r in llm.chat([first, second], use_tqdm=False)] == [
        "x" * 40 + "\n",
        "s\nu\n",
    ]
    (alone,) = llm.chat(first, params(max_tokens=3), use_tqdm=False)
    assert alone.outputs[0].text == "xxx"


@pytest.mark.parametrize("bad", ["", [300], [1] * 5000])
def test_a_bad_prompt_raises_before_anything_ran(llm: LLM, bad: Any) -> None:
    with pytest.raises(InvalidRequest):
        llm.generate(["good", bad], params(), use_tqdm=False)
    assert llm.engine.stats().steps.finished == 0
    assert not llm.engine.has_unfinished()
    assert texts(llm, "good") == [["good"]]


def test_a_prompt_that_never_fits_raises_before_anything_ran() -> None:
    llm = LLM("echo", num_kv_blocks=4)
    with pytest.raises(InvalidRequest, match="KV blocks"):
        llm.generate(["good", "x" * 60], params(max_tokens=20), use_tqdm=False)
    assert llm.engine.stats().steps.finished == 0
    assert not llm.engine.has_unfinished()


def stopped(llm: LLM, prompt: str, **options: Any) -> tuple[str, str | None, int | str | None, int]:
    (result,) = llm.generate(prompt, params(**options), use_tqdm=False)
    output = result.outputs[0]
    return output.text, output.finish_reason, output.stop_reason, len(output.token_ids)


def test_stop_strings_end_a_sample_within_a_token_or_across_tokens(llm: LLM) -> None:
    assert stopped(llm, "one two three", stop=("two",)) == ("one ", "stop", "two", 7)
    assert stopped(llm, "one two three", stop="two", include_stop_str_in_output=True)[0] == "one two"
    assert stopped(llm, "one two three", stop=("zwei",)) == ("one two three", "stop", None, 14)
    assert stopped(llm, "one two", stop=("twofold",)) == ("one two", "stop", None, 8)
    llm.engine.check_integrity()
    assert llm.engine.stats().kv.active_blocks == 0


def test_a_stop_string_completed_by_the_last_token_is_a_stop(llm: LLM) -> None:
    assert stopped(llm, "one two three", stop=("two",), max_tokens=7) == ("one ", "stop", "two", 7)
    assert stopped(llm, "one two three", stop=("two",), max_tokens=6) == ("one tw", "length", None, 6)


def test_nothing_stops_a_sample_before_min_tokens(llm: LLM) -> None:
    assert stopped(llm, "aXbXc", stop=("X",), min_tokens=3)[0] == "aXb"
    assert stopped(llm, "aXbXc", stop=("X",), min_tokens=2)[0] == "a"
    assert stopped(llm, "aXbXc", stop_token_ids=(ord("X"),), min_tokens=3)[:3] == ("aXb", "stop", ord("X"))
    assert stopped(llm, "ab", min_tokens=5) == ("ababa", "stop", None, 6)


def test_forced_tokens_stop_nothing_before_min_tokens(llm: LLM) -> None:
    """A label arrives as one token and many forced ones: each counts as if it had arrived alone."""
    shape = StructuredOutputs(choice=("aXbXc", "d"))

    def text(min_tokens: int) -> str:
        return stopped(llm, "aXbXc", stop=("X",), min_tokens=min_tokens, structured_outputs=shape)[0]

    assert [text(min_tokens) for min_tokens in (0, 2, 3, 4, 5)] == ["a", "a", "aXb", "aXb", "aXbXc"]


def test_a_stop_token_is_a_token_but_no_text(llm: LLM) -> None:
    assert stopped(llm, "abc", stop_token_ids=(ord("b"),)) == ("a", "stop", ord("b"), 2)
    assert stopped(llm, "abc", ignore_eos=True, max_tokens=7) == ("abcabca", "length", None, 7)


def drive(engine: Engine, until: Callable[[], bool] = lambda: False) -> list[RequestOutput]:
    outputs = []
    while engine.has_unfinished() and not until():
        outputs += engine.step()
    return outputs


def test_deltas_add_up(llm: LLM) -> None:
    tokens, sampling = llm.engine.input_processor.process(prompt="caf\u00e9!", params=params(n=2))
    llm.engine.add_request("r", tokens, sampling)
    outputs = drive(llm.engine)
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    for index in range(2):
        deltas = [delta for output in outputs for delta in output.deltas if delta.index == index]
        got: list[int] = []
        for delta in deltas:
            assert delta.offset == len(got)
            got += delta.token_ids
        assert "".join(delta.text for delta in deltas) == "caf\u00e9!"
        assert [delta.finish_reason for delta in deltas] == [None] * (len(deltas) - 1) + ["stop"]


@pytest.mark.parametrize("num_steps", [0, 1, 3])
def test_abort_gives_back_all_blocks(llm: LLM, num_steps: int) -> None:
    engine = llm.engine
    for name in ("kept", "gone"):
        tokens, sampling = engine.input_processor.process(prompt=name * 20, params=params(n=2))
        engine.add_request(name, tokens, sampling)
    for _ in range(num_steps):
        engine.step()
    (output,) = engine.abort("gone")
    assert output.finished
    assert {delta.finish_reason for delta in output.deltas} == {"abort"}
    assert engine.abort("gone") == []
    later = drive(engine)
    assert {output.request_id for output in later} == {"kept"}
    assert "".join(d.text for o in later for d in o.deltas if d.index == 1).endswith("kept" * 10)
    engine.check_integrity()
    stats = engine.stats()
    assert stats.kv.active_blocks == 0
    assert stats.kv.reserved_blocks == 1
    assert stats.requests.finished["abort"] == 1


def test_an_id_in_use_is_refused(llm: LLM) -> None:
    llm.engine.add_request("r", [97], params())
    with pytest.raises(InvalidRequest, match="already running"):
        llm.engine.add_request("r", [98], params())
    assert "".join(d.text for o in drive(llm.engine) for d in o.deltas) == "a"


class FailingRunner:
    """An echo that raises for a step that includes a culprit, at launch or when the step is waited for."""

    def __init__(self, *, at_launch: bool, num_failures: int = 10**9, culprit: int = ord("!")) -> None:
        self._echo, self._at_launch, self._culprit = EchoRunner(), at_launch, culprit
        self._num_failures = num_failures
        self._rows: dict[int, bool] = {}
        self.num_launched = 0

    def launch(self, plan: StepPlan) -> EchoStep | _FailingStep:
        self.num_launched += 1
        for new in plan.new_rows:
            self._rows[new.row] = self._culprit in new.token_ids
        is_bad = any(self._rows[work.row] for work in plan.work) and self._num_failures > 0
        self._num_failures -= is_bad
        if is_bad and self._at_launch:
            raise RuntimeError("launch")
        step = self._echo.launch(plan)
        return _FailingStep(step.plan) if is_bad else step

    def is_device_alive(self) -> bool:
        return True

    def close(self) -> None:
        pass


class _FailingStep:
    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan

    def sample(self) -> None: ...

    def wait(self) -> StepResult:
        raise RuntimeError("wait")


def run_failing(runner: FailingRunner, overlapped: bool) -> tuple[Engine, dict[str, tuple[str, str | None]]]:
    """Text and error code of every request."""
    parts = build_parts(EngineConfig(model="echo", async_scheduling=overlapped))
    engine = Engine(replace(parts, executor=runner))
    for prompt in ("one", "two!", "three", "four" * 10):
        tokens, sampling = engine.input_processor.process(prompt=prompt, params=params())
        engine.add_request(prompt, tokens, sampling)
    written: dict[str, str] = {}
    codes: dict[str, str | None] = {}
    for output in drive(engine, until=lambda: runner.num_launched > 500):
        name = output.request_id
        written[name] = written.get(name, "") + "".join(delta.text for delta in output.deltas)
        if output.finished:
            codes[name] = output.error_code
            assert (output.error is None) == (output.error_code is None)
    engine.check_integrity()
    assert not engine.has_unfinished()
    assert engine.stats().kv.active_blocks == 0
    return engine, {name: (written[name], code) for name, code in codes.items()}


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("at_launch", [False, True])
def test_a_step_that_keeps_failing_ends_only_the_culprit(overlapped: bool, at_launch: bool) -> None:
    engine, results = run_failing(FailingRunner(at_launch=at_launch), overlapped)
    assert results == {
        "one": ("one", None),
        "two!": ("", "engine_error"),
        "three": ("three", None),
        "four" * 10: ("four" * 10, None),
    }
    assert engine.stats().requests.finished["error"] == 1
    assert engine.stats().scheduler.steps_failed >= 2


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("at_launch", [False, True])
def test_a_step_that_fails_once_costs_nobody(overlapped: bool, at_launch: bool) -> None:
    engine, results = run_failing(FailingRunner(at_launch=at_launch, num_failures=1), overlapped)
    assert results == {name: (name, None) for name in ("one", "two!", "three", "four" * 10)}
    assert engine.stats().scheduler.steps_failed >= 1


@pytest.mark.parametrize("fails_first", [False, True], ids=["while sampling", "in the step before"])
def test_a_step_whose_samples_came_late_is_repeated(
    fails_first: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    constrained = params(max_tokens=9, structured_outputs=StructuredOutputs(regex="[a-z]{9}"))
    ((expected,),) = texts(LLM("echo"), ["abcdefghi"], constrained)
    engine = Engine(build_parts(EngineConfig(model="echo", async_scheduling=True)))
    num_failures = [0]

    def fail(step: EchoStep) -> StepResult:
        if num_failures[0] or (fails_first and step.plan.step_id < 3):
            return step.result
        num_failures[0] += 1
        raise RuntimeError("a step")

    if fails_first:
        monkeypatch.setattr(EchoStep, "wait", fail)
    else:
        sample = EchoStep.sample
        monkeypatch.setattr(EchoStep, "sample", lambda step: (fail(step), sample(step)))
    for name in ("one", "two"):
        engine.add_request(name, *engine.input_processor.process(prompt="abcdefghi", params=constrained))
    written = {"one": "", "two": ""}
    for output in drive(engine):
        written[output.request_id] += "".join(delta.text for delta in output.deltas)
        assert output.error is None
    engine.check_integrity()
    assert written == {"one": expected, "two": expected}
    assert (num_failures[0], engine.stats().scheduler.steps_failed) == (1, 1)


def test_a_failed_request_tells_its_error_in_the_result(caplog: pytest.LogCaptureFixture) -> None:
    llm = LLM("echo")
    llm.engine = Engine(
        replace(build_parts(EngineConfig(model="echo")), executor=FailingRunner(at_launch=True))
    )
    good, bad = llm.generate(["good", "bad!"], params(), use_tqdm=False)
    assert (good.outputs[0].text, good.error) == ("good", None)
    assert bad.outputs[0].finish_reason == "error"
    assert bad.error is not None
    assert "RuntimeError" in bad.error
    assert "1 of 2 requests failed, the first: the step raised RuntimeError" in caplog.text
