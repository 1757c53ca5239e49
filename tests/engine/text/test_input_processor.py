"""Every rejection has its code, and accepted requests are complete."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.config import EngineConfig
from pagemill.engine.engine import Engine
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.models.packaged import packaged_model_directory
from pagemill.engine.outputs import SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.text.input_processor import InputLimits, InputProcessor
from pagemill.engine.text.tokenizer import ByteTokenizer, HuggingFaceTokenizer

LIMITS = InputLimits(vocab_size=257, max_model_len=32, pool_tokens=24, max_num_seqs=4)
WITH_TOKENIZER = InputProcessor(ByteTokenizer(), LIMITS)
WITHOUT_TOKENIZER = InputProcessor(None, LIMITS)


def code(processor: InputProcessor, given: dict[str, Any], **params: Any) -> str:
    with pytest.raises(InvalidRequest) as refusal:
        processor.process(**given, params=SamplingParams(**params))
    assert str(refusal.value)
    return refusal.value.code


@pytest.mark.parametrize(
    "given",
    [
        {}, {"prompt": "a", "prompt_token_ids": [1]}, {"prompt": "a", "messages": []}, {"prompt": ""},
        {"prompt": "\ud800"}, {"prompt_token_ids": []}, {"prompt_token_ids": [257]},
        {"prompt_token_ids": [-1]}, {"prompt_token_ids": [1.0]}, {"prompt_token_ids": [True]},
        {"prompt_token_ids": ["a"]}, {"messages": []}, {"messages": [{"role": "user"}]},
        {"messages": [{"content": "a"}]}, {"messages": [{"role": "user", "content": ["a"]}]},
        {"messages": ["a"]},
    ],
    ids=repr,
)  # fmt: skip
def test_bad_input_is_an_invalid_job(given: dict[str, Any]) -> None:
    assert code(WITH_TOKENIZER, given) == "invalid_job"


@pytest.mark.parametrize(
    "params",
    [
        {"n": 5}, {"stop_token_ids": (257,)}, {"logit_bias": {300: 1.0}}, {"logit_bias": {-1: 1.0}},
        {"allowed_token_ids": (1, 999)}, {"stop": ("\ud800",)},
        {"structured_outputs": StructuredOutputs(choice=("a", "\ud800"))},
    ],
    ids=repr,
)  # fmt: skip
def test_parameters_this_model_can_not_take_are_an_invalid_job(params: dict[str, Any]) -> None:
    assert code(WITH_TOKENIZER, {"prompt": "a"}, **params) == "invalid_job"


def test_text_needs_a_tokenizer() -> None:
    assert code(WITHOUT_TOKENIZER, {"prompt": "a"}) == "invalid_job"
    assert code(WITHOUT_TOKENIZER, {"messages": [{"role": "user", "content": "a"}]}) == "invalid_job"
    tokens = {"prompt_token_ids": [1]}
    assert code(WITHOUT_TOKENIZER, tokens, stop=("a",)) == "unsupported_feature"
    shape = StructuredOutputs(choice=("a",))
    assert code(WITHOUT_TOKENIZER, tokens, structured_outputs=shape) == "unsupported_feature"
    assert WITHOUT_TOKENIZER.process(**tokens, params=SamplingParams())[0] == [1]


@pytest.mark.parametrize(
    "params",
    [
        {"beam_width": 2, "best_of": 2},
        {"beam_width": 2, "temperature": 0.5},
        {"beam_width": 2, "top_k": 3},
        {"beam_width": 2, "top_p": 0.5},
        {"beam_width": 2, "min_p": 0.5},
        {"beam_width": 2, "stop": ("a",)},
        {"beam_width": 2, "structured_outputs": StructuredOutputs(choice=("a",))},
    ],
    ids=repr,
)
def test_what_is_not_supported_is_refused(params: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequest) as refusal:
        SamplingParams(**params)
    assert refusal.value.code == "unsupported_feature"


def test_prompt_leaves_room_for_one_token() -> None:
    assert code(WITH_TOKENIZER, {"prompt": "a" * 32}) == "prompt_too_long"
    assert WITH_TOKENIZER.process(prompt="a" * 31, params=SamplingParams())[1].max_tokens == 1


def test_truncation_keeps_the_end_and_comes_before_the_checks() -> None:
    params = SamplingParams(truncate_prompt_tokens=3)
    token_ids, _ = WITH_TOKENIZER.process(prompt="x" * 40 + "end", params=params)
    assert token_ids == list(b"end")


def test_max_tokens_is_resolved() -> None:
    def resolved(num_prompt_tokens: int, **params: Any) -> int | None:
        tokens = [1] * num_prompt_tokens
        return WITH_TOKENIZER.process(prompt_token_ids=tokens, params=SamplingParams(**params))[1].max_tokens

    assert resolved(4, max_tokens=5) == 5
    assert resolved(30, max_tokens=5) == 2, "never past the context"
    assert resolved(4, max_tokens=None) == 21, "the pool's 24 slots; the last token needs none"
    assert resolved(4, max_tokens=None, n=2) == 9
    assert resolved(30, max_tokens=None) == 1


def test_a_request_that_can_never_fit_has_its_code() -> None:
    engine = Engine.from_config(EngineConfig(model="echo", num_kv_blocks=3))
    tokens, params = engine.input_processor.process(prompt="a" * 40, params=SamplingParams(max_tokens=30))
    with pytest.raises(InvalidRequest) as refusal:
        engine.add_request("big", tokens, params)
    assert refusal.value.code == "never_fits"
    assert not engine.has_unfinished()


def test_unresolved_max_tokens_is_refused() -> None:
    engine = Engine.from_config(EngineConfig(model="echo"))
    with pytest.raises(InvalidRequest, match="max_tokens is unresolved"):
        engine.add_request("r", [1], SamplingParams(max_tokens=None))


@pytest.mark.parametrize("token_ids", [[ByteTokenizer().vocab_size], [-1], [2**40], [1.5], ["a"]])
def test_the_engine_itself_refuses_tokens_that_do_not_exist(token_ids: list[Any]) -> None:
    """On a GPU one such id would end the process for every other request."""
    engine = Engine.from_config(EngineConfig(model="echo"))
    params = SamplingParams(max_tokens=4)
    with pytest.raises(InvalidRequest, match="prompt_token_ids"):
        engine.add_request("a", token_ids, params)
    with pytest.raises(InvalidRequest, match="resume"):
        engine.add_request("b", [1], params, resume=[SampleState(0, token_ids)])
    assert not engine.has_unfinished()


def test_a_stop_string_that_is_a_special_token_stops() -> None:
    tokenizer = HuggingFaceTokenizer(packaged_model_directory())
    processor = InputProcessor(tokenizer, replace(LIMITS, vocab_size=tokenizer.vocab_size))
    (token,) = tokenizer.encode("<|im_start|>", add_special_tokens=False)
    cases: list[tuple[dict[str, Any], tuple[int, ...]]] = [
        ({}, (token,)),
        ({"skip_special_tokens": False}, ()),
    ]
    for fields, expected in cases:
        params = SamplingParams(stop=("<|im_start|>", "word"), **fields)
        _, read = processor.process(prompt="Hi", params=params)
        assert (read.stop_token_ids, read.stop) == (expected, params.stop)
