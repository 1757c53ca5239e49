"""The request that an engine receives, and its possible responses."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import pytest

from pagemill.common.sampling_fields import SamplingFields
from pagemill.engine.sampling_params import SamplingParams
from pagemill.worker.engine_host.endpoint.connection import BadAnswer
from pagemill.worker.engine_host.endpoint.dialect import (
    PAGEMILL,
    SGLANG,
    VLLM,
    Counts,
    Dialect,
    Query,
    accepts_all,
    body,
    counts,
    pieces,
    unsupported,
)

SET: dict[str, Any] = {
    "min_tokens": 1, "top_k": 5, "min_p": 0.1, "stop_token_ids": (3,), "include_stop_str_in_output": True,
    "ignore_eos": True, "repetition_penalty": 1.1, "logit_bias": {7: 1.0}, "allowed_token_ids": (1, 2),
    "bad_words": ("x",), "skip_special_tokens": False,
}  # fmt: skip
"""A value for each field that OpenAI's interface does not have."""


def query(**fields: Any) -> Query:
    given: dict[str, Any] = {"model": "m", "prompt": "p", "params": SamplingParams(), "max_tokens": 5}
    return Query(**(given | fields))


@pytest.mark.parametrize("name", SET)
def test_a_field_is_sent_or_its_job_is_left_to_others(name: str) -> None:
    params = SamplingParams(**{name: SET[name]})
    assert unsupported(params, Dialect())
    for dialect in (VLLM, SGLANG, PAGEMILL):
        assert unsupported(params, dialect) == (name not in dialect.fields)
        assert (name in body(query(params=params), dialect)) == (name in dialect.fields)
    assert accepts_all(VLLM)
    assert not accepts_all(SGLANG)


def test_no_sampling_field_is_forgotten() -> None:
    """A new field is either sent, or checked by `EndpointInputs`: declare which, here and in dialect.py."""
    standard = {
        "temperature", "top_p", "seed", "stop", "presence_penalty", "frequency_penalty", "n", "max_tokens",
    }  # fmt: skip
    checked = {
        "best_of", "beam_width", "length_penalty", "early_stopping", "logprobs", "prompt_logprobs",
        "structured_outputs", "thinking_token_budget", "label_probs", "truncate_prompt_tokens",
    }  # fmt: skip
    assert {field.name for field in fields(SamplingFields)} == standard | checked | SET.keys()


def test_the_body_of_a_chat() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "beg"}]
    params = SamplingParams(seed=2**40 + 3, temperature=0.5, stop=("x",), n=2)
    made = body(
        query(prompt=None, messages=messages, params=params, num_samples=2, is_resumed=True, salt="t"), VLLM
    )
    assert made["messages"] == messages
    assert (made["n"], made["seed"], made["stop"], made["max_tokens"]) == (2, 3, ("x",), 5)
    assert (made["continue_final_message"], made["add_generation_prompt"], made["cache_salt"]) == (
        True,
        False,
        "t",
    )
    assert "top_k" not in made
    plain = body(query(max_tokens=None), Dialect())
    assert "max_tokens" not in plain
    assert plain["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize(
    "event",
    [
        {},
        {"choices": 3},
        {"choices": [4]},
        {"choices": [{"index": 2, "text": "x"}]},
        {"choices": [{"index": True, "text": "x"}]},
        {"choices": [{"text": 5}]},
        {"choices": [{"text": "x", "token_ids": ["1"]}]},
        {"choices": [{"text": "x", "token_ids": [-1]}]},
        {"choices": [{"text": "x", "token_ids": [2**31]}]},
        {"choices": [{"text": "x", "finish_reason": "abort"}]},
        {"choices": [{"text": "x", "finish_reason": ["stop"]}]},
        {"error": {"message": "m"}},
    ],
)
def test_what_cannot_be_used_is_refused(event: dict[str, Any]) -> None:
    with pytest.raises(BadAnswer):
        pieces(event, 2)


def test_what_comes_back() -> None:
    (piece,) = pieces(
        {"choices": [{"index": 1, "text": "a\ud800", "token_ids": [4], "finish_reason": "stop"}]}, 2
    )
    assert (piece.index, piece.text, piece.token_ids, piece.finish_reason) == (1, "a?", [4], "stop")
    (piece,) = pieces({"choices": [{"index": 0, "delta": {"role": "assistant", "content": None}}]}, 1)
    assert (piece.text, piece.finish_reason) == ("", None)
    assert counts({"usage": None}) is None
    assert counts({"usage": {"prompt_tokens": "x", "completion_tokens": 2**40}}) == Counts(0, 0, 0)
    usage = {"prompt_tokens": 5, "completion_tokens": 3, "prompt_tokens_details": {"cached_tokens": 9}}
    assert counts({"usage": usage}) == Counts(5, 3, 5)
