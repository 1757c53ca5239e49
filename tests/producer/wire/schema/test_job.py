"""The accepted jobs, and errors that never quote a job."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import torch

from pagemill.common.sampling_fields import MAX_SEED
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job

BASE = {"prompt": "SECRET", "model": "m"}


@pytest.mark.parametrize(
    "fields",
    [
        {"prompt": ""}, {"prompt": None}, {"prompt": 5}, {"prompt": "\ud800"},
        {"messages": [{"role": "user", "content": "hi"}]}, {"prompt": None, "messages": []},
        {"prompt": None, "messages": [{"role": "pirate", "content": "SECRET"}]},
        {"prompt": None, "messages": [{"role": "user", "content": "\udfff"}]},
        {"prompt": None, "prompt_token_ids": []}, {"prompt": None, "prompt_token_ids": [1, -1]},
        {"prompt": None, "prompt_token_ids": [2**31]}, {"prompt": None, "prompt_token_ids": [1.5]},
        {"prompt": None, "prompt_token_ids": ["1"]}, {"model": ""}, {"model": "../SECRET path"},
        {"model": None}, {"max_tokens": 0}, {"max_tokens": "16"}, {"max_tokens": True}, {"min_tokens": -1},
        {"min_tokens": 17, "max_tokens": 16}, {"temperature": -0.1}, {"temperature": float("nan")},
        {"temperature": float("inf")}, {"top_p": 0.0}, {"top_p": 1.1}, {"top_k": -2}, {"min_p": 1.1},
        {"n": 0}, {"n": 129}, {"best_of": 0}, {"seed": -1}, {"seed": MAX_SEED + 1}, {"stop": [""]},
        {"stop": ["x"] * 65}, {"stop": ["\ud800"]}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.1},
        {"repetition_penalty": 0.0}, {"logit_bias": {"1": float("inf")}}, {"logit_bias": {"-1": 1.0}},
        {"logit_bias": {"SECRET": 1.0}}, {"logprobs": 21}, {"allowed_token_ids": []},
        {"truncate_prompt_tokens": 0}, {"structured_outputs": {}}, {"structured_outputs": {"choice": []}},
        {"structured_outputs": {"choice": ["a", ""]}},
        {"structured_outputs": {"choice": ["a"], "regex": "b"}}, {"structured_outputs": {"yaml": "a"}},
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"choice": ["a"]}},
        {"priority": "urgent"}, {"tenant": "a:b"}, {"delay": 1.0, "run_at": 1.0}, {"delay": -1}, {"ttl": 0},
        {"deadline": float("nan")}, {"timeout": 0.0}, {"max_attempts": 0}, {"idempotency_key": ""},
        {"metadata": "text"}, {"metadata": {"x": float("nan")}}, {"metadata": {"x": "\ud800"}},
        {"metadata": {"x": {1, 2}}}, {"metadata": {1: "x"}}, {"metadata": {"x": "y" * 20_000}},
        {"traceparent": "hello"}, {"temprature": 1.0},
    ],
    ids=lambda fields: ascii(fields)[:60],
)  # fmt: skip
def test_what_makes_no_sense_is_refused_without_quoting(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidJob) as caught:
        Job.parse(BASE | fields)
    assert caught.value.code == "invalid_job"
    assert "SECRET" not in str(caught.value).replace("logit_bias.SECRET", "")


def test_metadata_too_deep_is_refused() -> None:
    deep: dict[str, object] = {}
    for _ in range(5000):
        deep = {"x": deep}
    with pytest.raises(InvalidJob):
        Job.parse(BASE | {"metadata": deep})


def test_what_is_not_supported_is_refused_never_ignored() -> None:
    for ranked in ({"best_of": 2}, {"beam_width": 2}):
        with pytest.raises(InvalidJob, match="stream") as caught:
            Job.parse(BASE | {"stream": True} | ranked)
        assert caught.value.code == "unsupported_feature"
        Job.parse(BASE | ranked)


def test_an_error_names_its_field_once() -> None:
    with pytest.raises(InvalidJob) as caught:
        Job.parse(BASE | {"logit_bias": {"-1": 1.0}})
    assert str(caught.value) == "logit_bias: token ids must be in [0, 2**31)"


def test_an_unknown_field_is_named() -> None:
    with pytest.raises(InvalidJob, match="temprature"):
        Job.parse(BASE | {"temprature": 1.0})


def test_a_job_survives_its_envelope() -> None:
    job = Job.parse(
        {
            "messages": [{"role": "user", "content": "Wie geht's? \N{GRINNING FACE} \x00"}],
            "model": "org/model:8b",
            "n": 3,
            "temperature": 0,
            "seed": MAX_SEED,
            "stop": "\n",
            "logit_bias": {"5": -100, 7: 1.5},
            "structured_outputs": {"choice": ["a", "b"]},
            "metadata": {"row": 1, "nested": [None, True, {"x": 0.5}]},
            "traceparent": f"00-{'a' * 32}-{'b' * 16}-01",
            "deadline": 2e9,
        }
    )
    assert Job.from_payload(job.to_payload()) == job
    assert set(json.loads(job.to_payload())) < set(Job.model_fields) | {"v"}


DEFAULTS = {"temperature": 0.6, "top_k": 20, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.05}
"""The defaults of a model, in its generation_config.json."""


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_field_that_is_set_comes_before_the_models_default(name: str) -> None:
    default = Job.model_fields[name].default
    for value in (default, 0.5 if name != "top_k" else 5):
        job = Job.from_payload(Job.parse(BASE | {name: value}).to_payload())
        assert job.sampling(DEFAULTS)[name] == value
        assert {other: job.sampling(DEFAULTS)[other] for other in DEFAULTS if other != name} == {
            other: DEFAULTS[other] for other in DEFAULTS if other != name
        }


def test_a_field_that_is_not_set_has_the_models_default() -> None:
    job = Job.from_payload(Job.parse(BASE).to_payload())
    assert {name: job.sampling(DEFAULTS)[name] for name in DEFAULTS} == DEFAULTS
    assert job.sampling()["temperature"] == 1.0


@pytest.mark.parametrize(
    "fields",
    [
        {"task": "score"},
        {"beam_width": 2},
        {"label_probs": "product", "structured_outputs": {"choice": ["a", "b"]}},
    ],
)
def test_the_models_defaults_do_not_change_what_is_ranked(fields: dict[str, Any]) -> None:
    job = Job.parse(BASE | fields)
    assert job.sampling(DEFAULTS) == job.sampling()


@pytest.mark.parametrize("name", DEFAULTS)
def test_jobs_that_a_model_tells_apart_are_not_one(name: str) -> None:
    seeded = BASE | {"seed": 1}
    assert Job.parse(seeded).digest() != Job.parse(seeded | {name: Job.model_fields[name].default}).digest()


@pytest.mark.parametrize(
    "payload",
    [b"", b"null", b"[]", b"{}", b'{"v":2,"prompt":"p","model":"m"}', b'{"v":1}', b"\xff", b"[" * 100_000,
     b'{"v":1,"prompt":"p","model":"m","temperature":NaN}', b'{"v":1,"prompt":"p","model":"m","top_p":1e999}',
     b'{"v":1,"prompt":"\\ud800","model":"m"}', b'{"v":1,"prompt":"p","model":"m","x":1}'],
)  # fmt: skip
def test_a_broken_envelope_is_an_invalid_job(payload: bytes) -> None:
    with pytest.raises(InvalidJob):
        Job.from_payload(payload)


def test_a_job_over_the_size_limit_is_refused() -> None:
    with pytest.raises(InvalidJob) as caught:
        Job.parse(BASE | {"prompt": "x" * MAX_PAYLOAD_BYTES}).to_payload()
    assert caught.value.code == "payload_too_large"
    with pytest.raises(InvalidJob) as caught:
        Job.from_payload(b" " * (MAX_PAYLOAD_BYTES + 1))
    assert caught.value.code == "payload_too_large"


def test_max_tokens_defaults_to_16_for_prompts_and_the_rest_for_chats() -> None:
    assert Job.parse(BASE).sampling()["max_tokens"] == 16
    chat = Job.parse({"messages": [{"role": "user", "content": "hi"}], "model": "m"})
    assert chat.sampling()["max_tokens"] is None
    assert Job.parse(BASE | {"max_tokens": 3}).sampling()["max_tokens"] == 3


@pytest.mark.parametrize(
    ("response_format", "schema"),
    [
        ({"type": "text"}, None),
        ({"type": "json_object"}, {"type": "object"}),
        (
            {"type": "json_schema", "json_schema": {"name": "n", "schema": {"type": "array"}}},
            {"type": "array"},
        ),
    ],
)
def test_response_format_becomes_structured_outputs(response_format: object, schema: object) -> None:
    structured = Job.parse(BASE | {"response_format": response_format}).structured_outputs
    assert (json.loads(structured.json) if structured and structured.json else None) == schema


def test_cost_counts_the_prompt_and_every_sample() -> None:
    assert (
        Job.parse({"prompt_token_ids": [1] * 10, "model": "m", "max_tokens": 5, "n": 4}).cost_tokens() == 30
    )
    assert Job.parse(BASE | {"prompt": "x" * 300, "max_tokens": 1}).cost_tokens() == 102


def test_the_digest_is_of_the_work_alone() -> None:
    job = Job.parse(BASE)
    elsewhere = {"priority": "low", "tenant": "t", "ttl": 5.0, "metadata": {"a": 1}, "stream": True}
    same = Job.parse(BASE | elsewhere)
    assert same.digest() == job.digest()
    for change in ({"prompt": "other"}, {"temperature": 0.5}, {"model": "n"}, {"seed": 1}):
        assert Job.parse(BASE | change).digest() != job.digest()


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("max_tokens", np.int64(5), 5),
        ("n", np.int32(1), 1),
        ("seed", np.uint64(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("dedupe", np.bool_(False), False),
        ("prompt", np.str_("x"), "x"),
        ("stop", np.array(["a", "b"]), ("a", "b")),
        ("stop_token_ids", [np.int64(3), 4], (3, 4)),
        ("stop_token_ids", np.array([3, 4]), (3, 4)),
        ("stop_token_ids", torch.tensor([3, 4]), (3, 4)),
        ("logit_bias", {7: np.float64(1.0)}, {7: 1.0}),
        ("metadata", {"a": [np.int64(3)], "b": np.float64(0.5)}, {"a": [3], "b": 0.5}),
    ],
)
def test_numbers_of_other_libraries_are_numbers(name: str, given: Any, expected: Any) -> None:
    job = Job.parse({"model": "m", "prompt": "p", "temperature": 0.0} | {name: given})
    assert getattr(job, name) == expected
    assert Job.from_payload(job.to_payload()) == job


@pytest.mark.parametrize(
    "given", [True, 5.0, "5", np.float64(5.0), np.array([5]), np.datetime64("2026-01-01")]
)
def test_other_values_are_still_no_integers(given: Any) -> None:
    with pytest.raises(InvalidJob, match="max_tokens"):
        Job.parse({"model": "m", "prompt": "p", "max_tokens": given})
