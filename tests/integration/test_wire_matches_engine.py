"""The engine accepts every sampling setting of the job schema."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest
from pydantic import ValidationError

from pagemill.common.sampling_fields import SAMPLING_FIELDS
from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.sampling_params import SamplingParams
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job


def test_a_job_and_the_engine_have_the_same_fields_and_defaults() -> None:
    job, params = Job(prompt="p", model="m"), SamplingParams()
    differing = [name for name in SAMPLING_FIELDS if getattr(job, name) != getattr(params, name)]
    # On the wire None also means: 16 for a prompt, the rest of the context for a chat.
    assert differing == ["max_tokens"]
    assert tuple(field.name for field in dataclasses.fields(params)) == SAMPLING_FIELDS


@pytest.mark.parametrize(
    "fields",
    [
        {"temperature": -0.1}, {"temperature": 0.0}, {"top_k": -2}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
        {"min_p": -0.1}, {"min_p": 1.0}, {"seed": -1}, {"seed": 2**63 - 1}, {"seed": 2**63}, {"n": 0},
        {"max_tokens": 0}, {"min_tokens": -1}, {"presence_penalty": 2.1}, {"frequency_penalty": -2.0},
        {"repetition_penalty": 0.0}, {"logprobs": -1}, {"logprobs": 20}, {"logprobs": 21}, {"stop": ("",)},
        {"stop": "one"}, {"stop": ("x",) * 65}, {"allowed_token_ids": ()}, {"truncate_prompt_tokens": 0},
        {"logit_bias": {1: float("inf")}}, {"temperature": float("nan")}, {"n": 2, "best_of": 1}, {"best_of": 3},
        {"n": 3, "beam_width": 2}, {"beam_width": 2}, {"beam_width": 0}, {"length_penalty": 2.0},
        {"beam_width": 2, "length_penalty": 10.5}, {"beam_width": 2, "length_penalty": -10.0},
        {"temperature": 5e-324}, {"temperature": 1e-40}, {"temperature": 1e6}, {"temperature": 1.1e6},
        {"temperature": 1e308}, {"temperature": 10**400}, {"repetition_penalty": 5e-324}, {"repetition_penalty": 1e-3},
        {"repetition_penalty": 1e3}, {"repetition_penalty": 1e308}, {"repetition_penalty": float("nan")},
        {"logit_bias": {1: -1e6}}, {"logit_bias": {1: 3.5e38}}, {"logit_bias": {1: -1e308}}, {"logit_bias": {1: 7}},
        {"logit_bias": {1: float("nan")}}, {"logit_bias": {1: 10**400}}, {"top_p": 5e-324}, {"min_p": 5e-324},
        {"top_k": 2**31 - 1}, {"top_k": 2**31}, {"top_p": float("nan")}, {"min_p": float("nan")},
        {"presence_penalty": float("nan")}, {"frequency_penalty": float("-inf")},
        {"beam_width": 2, "length_penalty": float("nan")}, {"beam_width": 2, "length_penalty": 1e308},
        {"early_stopping": True}, {"beam_width": 2, "early_stopping": "never"}, {"beam_width": 2, "early_stopping": 1},
    ],
    ids=repr,
)  # fmt: skip
def test_both_accept_or_both_refuse(fields: dict[str, Any]) -> None:
    def accepts(kind: Any, fields: dict[str, Any]) -> bool:
        try:
            kind(**fields)
        except (ValidationError, InvalidRequest):
            return False
        return True

    assert accepts(Job, fields | {"prompt": "p", "model": "m"}) == accepts(SamplingParams, fields)


def nested(depth: int) -> dict[str, Any]:
    """A schema of this many nested objects."""
    schema: dict[str, Any] = {}
    for _ in range(depth - 1):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("fields", "code"),
    [
        ({"choice": ("a", "b")}, None), ({"choice": ()}, "invalid_job"), ({"choice": ("",)}, "invalid_job"),
        ({"regex": "("}, None), ({"regex": ""}, "invalid_job"), ({"regex": "a" * 65_536}, None),
        ({"regex": "a" * 65_537}, "schema_too_complex"), ({"grammar": ""}, "invalid_job"),
        ({"json": "{}"}, None), ({"json": "{"}, "schema_invalid"), ({"json": "[]"}, "schema_invalid"),
        ({"json": "7"}, "schema_invalid"), ({"json": {"type": "object"}}, None), ({"json": True}, None),
        ({"json": nested(64)}, None), ({"json": nested(65)}, "schema_too_complex"),
        ({"json": json.dumps(nested(65))}, "schema_too_complex"), ({"json": "[" * 60_000}, "schema_too_complex"),
        ({"json": {"enum": [float("nan")]}}, "schema_invalid"), ({"json": 7}, "invalid_job"),
        ({"regex": "a", "choice": ("a",)}, "invalid_job"), ({}, "invalid_job"),
    ],
    ids=lambda value: repr(value)[:50],
)  # fmt: skip
def test_both_refuse_the_same_structures_with_the_same_code(fields: dict[str, Any], code: str | None) -> None:
    def job_code() -> str | None:
        try:
            Job.parse({"prompt": "p", "model": "m", "structured_outputs": fields})
        except InvalidJob as error:
            return error.code
        return None

    def engine_code() -> str | None:
        try:
            SamplingParams(structured_outputs=fields)  # type: ignore[arg-type]
        except InvalidRequest as error:
            return error.code
        return None

    assert (job_code(), engine_code()) == (code, code)


def test_a_schema_is_the_same_text_on_both_sides() -> None:
    schema = {"type": "string", "const": "\u00e9"}
    job = Job.parse({"prompt": "p", "model": "m", "structured_outputs": {"json": schema}})
    assert job.structured_outputs is not None
    assert job.structured_outputs.json == StructuredOutputs(json=schema).json  # type: ignore[arg-type]
    assert Job.from_payload(job.to_payload()) == job


def test_a_job_s_sampling_makes_the_engine_s_parameters() -> None:
    text = '{"temperature": 0.5, "stop": ["a", "b"], "logit_bias": {"5": 1.5}, "allowed_token_ids": [1, 2]}'
    job = Job.from_payload(b'{"v":1,"prompt":"p","model":"m",' + text.encode()[1:])
    params = SamplingParams(**{name: getattr(job, name) for name in SAMPLING_FIELDS})
    assert params.stop == ("a", "b")
    assert dict(params.logit_bias) == {5: 1.5}
    assert params.allowed_token_ids == (1, 2)
    assert params.max_tokens is None
