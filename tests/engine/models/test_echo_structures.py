"""The echo model with structures: its output is valid and complete."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import jsonschema
import pytest

from pagemill import LLM, SamplingParams, StructuredOutputs
from pagemill.engine.models.echo import echo_name, echo_step_seconds, reply_with

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 2},
        "age": {"type": "integer"},
        "height": {"type": "number"},
        "tags": {"type": "array", "items": {"type": "string"}, "minItems": 2},
        "kind": {"enum": ["a", "b"]},
        "born": {"type": "string", "format": "date"},
        "home": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "note": {"type": ["string", "null"]},
    },
    "required": ["name", "age", "height", "tags", "kind", "born", "home", "note"],
}
PROMPTS = ("say negative now {} please", '{"name": "Ada"}', "42 apples, 7 pears", 'naïve 漢字 \\ "quoted"')


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    llm = LLM("echo")
    yield llm
    llm.close()


def said(llm: LLM, prompt: str, **structure: Any) -> str:
    params = SamplingParams(max_tokens=400, structured_outputs=StructuredOutputs(**structure))
    (output,) = llm.generate([prompt], params)
    assert output.outputs[0].finish_reason == "stop", output.outputs[0].text
    return output.outputs[0].text


@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize(
    "schema",
    [
        PERSON,
        {"type": "object"},
        {"type": "array", "items": {"type": "number"}, "minItems": 3, "maxItems": 5},
        {"type": "string", "pattern": "^[a-z]{3,8}$"},
        {"anyOf": [{"type": "boolean"}, {"type": "null"}]},
    ],
)
def test_a_schema_holds(llm: LLM, prompt: str, schema: dict[str, Any]) -> None:
    jsonschema.validate(json.loads(said(llm, prompt, json=schema)), schema)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_choices_patterns_and_grammars_hold(llm: LLM, prompt: str) -> None:
    assert said(llm, prompt, choice=("positive", "negative")) in ("positive", "negative")
    assert re.fullmatch("[0-9]+x", said(llm, prompt, regex="[0-9]+x"))
    assert re.fullmatch("a+b", said(llm, prompt, grammar='start: "a"+ "b"'))


def test_a_text_repeats_the_prompt_as_far_as_it_fits(llm: LLM) -> None:
    text = json.loads(said(llm, "0123456789tail", json={"type": "string"}))
    assert text in "0123456789tail"
    assert text.endswith("tail")


def test_a_reply_is_followed(llm: LLM) -> None:
    reply_with(lambda prompt: json.dumps({"name": prompt.upper(), "n": 7}))
    try:
        schema = {
            "type": "object",
            "properties": {"name": {"type": "string"}, "n": {"type": "integer"}},
            "required": ["name", "n"],
        }
        assert json.loads(said(llm, "ada", json=schema)) == {"name": "ADA", "n": 7}
        assert (
            llm.generate(["x"], SamplingParams(max_tokens=40))[0].outputs[0].text == '{"name": "X", "n": 7}'
        )
    finally:
        reply_with(None)
    assert llm.generate(["x"], SamplingParams(max_tokens=40))[0].outputs[0].text == "x"


def test_its_name_and_pace() -> None:
    assert [echo_name(model) for model in ("echo", "echo:5", "echo::a/b:c", "echo:2:m")] == [
        "echo", "echo", "a/b:c", "m",
    ]  # fmt: skip
    assert [echo_step_seconds(model) for model in ("echo", "echo::m", "echo:5:m")] == [0.0, 0.0, 0.005]
