"""A request that resumes from a checkpoint produces the same output as an uninterrupted one."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import RequestOutput, SampleState
from pagemill.engine.plan import TokenLogprobs
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.models.families.native_cases import write_llama

PROMPT = [5, 17, 3, 80, 41, 2, 9, 33, 60]


@dataclass
class Sample:
    """The output of one sample that the caller has received so far."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: Any = None


def run(
    engine: Engine,
    prompt: str | list[int],
    params: SamplingParams,
    samples: list[Sample],
    cut: int | None = None,
) -> list[Sample]:
    """Continue with `samples`, in place, to the end or until all have `cut` tokens; then abort the request."""
    given: dict[str, Any] = {"prompt": prompt} if isinstance(prompt, str) else {"prompt_token_ids": prompt}
    tokens, resolved = engine.input_processor.process(**given, params=params)
    resume = [
        SampleState(index, list(sample.token_ids), sample.finish_reason)
        for index, sample in enumerate(samples)
    ]
    engine.add_request("r", tokens, resolved, resume=resume)

    def take(outputs: list[RequestOutput]) -> None:
        for delta in (delta for output in outputs for delta in output.deltas):
            sample = samples[delta.index]
            assert delta.offset == len(sample.token_ids)
            sample.text += delta.text
            sample.token_ids += delta.token_ids
            if delta.logprobs is not None:
                sample.logprobs = (sample.logprobs or []) + delta.logprobs
            sample.finish_reason = None if delta.finish_reason == "abort" else delta.finish_reason

    while engine.has_unfinished():
        take(engine.step())
        if cut is not None and all(s.finish_reason or len(s.token_ids) >= cut for s in samples):
            break
    take(engine.abort("r"))
    while engine.has_unfinished():
        take(engine.step())
    engine.check_integrity()
    return samples


def check_every_cut(engine: Engine, prompt: str | list[int], params: SamplingParams) -> list[Sample]:
    whole = run(engine, prompt, params, [Sample() for _ in range(params.n)])
    longest = max(len(sample.token_ids) for sample in whole)
    for cut in range(1, longest):
        samples = run(engine, prompt, params, [Sample() for _ in range(params.n)], cut)
        if any(sample.finish_reason is None for sample in samples):
            run(engine, prompt, params, samples)
        check_equal(samples, whole, f"cut after {cut} tokens")
    return whole


def check_equal(samples: list[Sample], whole: list[Sample], where: str) -> None:
    for got, expected in zip(samples, whole, strict=True):
        assert replace(got, logprobs=None) == replace(expected, logprobs=None), where
        assert (got.logprobs is None) == (expected.logprobs is None)
        for entry, reference in zip(got.logprobs or [], expected.logprobs or [], strict=True):
            # A prompt computed in one pass differs from one computed token by token in the last bits.
            assert entry.token_id == reference.token_id, where
            assert entry.logprob == pytest.approx(reference.logprob, abs=1e-4), where
            assert dict(entry.top) == pytest.approx(dict(reference.top), abs=1e-4), where


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("tiny"))


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("caching", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.0, "logprobs": 2, "repetition_penalty": 1.5},
        {"seed": 7},
        {"seed": 7, "n": 3, "top_p": 0.9, "frequency_penalty": 0.5, "presence_penalty": 0.5},
        {"seed": 8, "min_tokens": 6, "stop_token_ids": tuple(range(40))},
        {"seed": 8, "n": 2, "stop_token_ids": tuple(range(10))},
    ],
    ids=str,
)
def test_tokens_continue(checkpoint: Path, options: dict[str, Any], caching: bool, overlapped: bool) -> None:
    engine = Engine.from_config(
        EngineConfig(
            model=str(checkpoint), num_kv_blocks=64, block_size=4, num_threads=1,
            enable_prefix_caching=caching, async_scheduling=overlapped,
        )
    )  # fmt: skip
    whole = check_every_cut(engine, PROMPT, SamplingParams(**({"max_tokens": 10} | options)))
    if "logprobs" in options:
        assert [[entry.token_id for entry in sample.logprobs or []] for sample in whole] == [
            sample.token_ids for sample in whole
        ]


@pytest.fixture(params=[False, True], ids=["depth 0", "depth 1"])
def echo(request: pytest.FixtureRequest) -> Engine:
    return Engine.from_config(EngineConfig(model="echo", async_scheduling=request.param))


@pytest.mark.parametrize(
    ("prompt", "options", "text"),
    [
        ("one two three", {"stop": ("two",)}, "one "),
        ("one two three", {"stop": ("two",), "include_stop_str_in_output": True}, "one two"),
        ("one two", {"stop": ("twofold",)}, "one two"),
        ("one two", {"stop": ("two",), "max_tokens": 7}, "one "),
        ("aXYbXYc", {"stop": ("XY",), "min_tokens": 2}, "a"),
        ("aXYbXYc", {"stop": ("XY",), "min_tokens": 4}, "aXYb"),
        ("caf\u00e9 \U0001f389!", {}, "caf\u00e9 \U0001f389!"),
        ("caf\u00e9 \U0001f389!", {"stop": ("\U0001f389!",), "n": 2}, "caf\u00e9 "),
        ("card", {"structured_outputs": StructuredOutputs(choice=("car", "card", "cat"))}, "card"),
    ],
)
def test_text_continues(echo: Engine, prompt: str, options: dict[str, Any], text: str) -> None:
    whole = check_every_cut(echo, prompt, SamplingParams(**({"max_tokens": 40} | options)))
    assert {sample.text for sample in whole} == {text}


def test_finished_siblings_are_not_run_again(echo: Engine) -> None:
    tokens = list(b"abc")
    done = Sample("abc", [*tokens, 256], finish_reason="stop")
    open_ = Sample("a", tokens[:1])
    run(echo, "abc", SamplingParams(n=2, max_tokens=9), [done, open_])
    assert done == Sample("abc", [*tokens, 256], finish_reason="stop")
    assert open_ == done
    assert echo.stats().requests.generated_tokens == 3


def test_a_checkpoint_with_nothing_left_is_refused(echo: Engine) -> None:
    with pytest.raises(InvalidRequest, match="nothing left to generate"):
        run(echo, "abc", SamplingParams(max_tokens=2), [Sample("ab", [97, 98])])
    with pytest.raises(InvalidRequest, match="nothing left to generate"):
        run(echo, "abc", SamplingParams(max_tokens=2), [Sample("ab", [97, 98], finish_reason="length")])
    assert not echo.has_unfinished()


@pytest.mark.slow
def test_smollm2_continues() -> None:
    engine = Engine.from_config(EngineConfig(model="smollm2", num_kv_blocks=64, num_threads=1))
    for options in ({"temperature": 0.0}, {"seed": 3, "n": 2, "top_p": 0.9}):
        params = SamplingParams(**({"max_tokens": 6, "stop": ("\n\n",)} | options))
        whole = check_every_cut(engine, "The three animals in the garden were a", params)
        assert all(sample.text for sample in whole)
