"""Tool calls in elements through the queue: types by the tools' schemas, streams, forced and strict calls."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.wire.schema.errors import JobError
from tests.worker.harness import PATIENCE_S, running_worker, worker_config

WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "unit": {"enum": ["C", "F"]},
                "days": {"type": "integer", "maximum": 9},
                "tags": {"$ref": "#/$defs/tags"},
            },
            "required": ["city", "tags"],
            "additionalProperties": False,
            "$defs": {"tags": {"type": "array", "items": {"type": "string"}, "maxItems": 2}},
        },
    },
}
CALL = (
    "<tool_call>\n<function=weather>\n<parameter=city>\n50667 Köln\n</parameter>\n<parameter=days>\n3\n</parameter>\n"
    '<parameter=tags>\n["a"]\n</parameter>\n</function>\n</tool_call>'
)


@pytest.fixture(scope="module")
def queue(valkey_url: str) -> Iterator[Producer]:
    config = worker_config(
        valkey_url, "elements", model="echo", tool_call_parser="qwen3_coder", reasoning_parser="think"
    )
    with running_worker(config), Producer(valkey_url, queue="elements") as queue:
        yield queue


def said(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "echo", "messages": messages, "temperature": 0.0, "max_tokens": 600} | fields


def test_types_are_those_of_the_schema(queue: Producer) -> None:
    handle = queue.submit(said(f"<think>Hm.</think>{CALL}{CALL}", tools=[WEATHER], stream=True))
    calls: dict[int, list[str]] = {}
    for event in handle.stream():
        if event.type == "snapshot":
            calls = {}
        for part in event.tool_calls:
            if part.id is not None:
                calls[part.index] = [part.name or "", ""]
            calls[part.index][1] += part.arguments
    result = handle.result(PATIENCE_S)
    assert (result.reasoning, result.text) == ("Hm.", "")
    assert [[call.function.name, call.function.arguments] for call in result.tool_calls] == list(
        calls.values()
    )
    for call in result.tool_calls:
        assert json.loads(call.function.arguments) == {"city": "50667 Köln", "days": 3, "tags": ["a"]}
    assert len(result.tool_calls) == 2


@pytest.mark.slow
@pytest.mark.parametrize("strict", [True, False])
def test_a_constrained_call_is_valid(queue: Producer, strict: bool) -> None:
    tool = WEATHER | {"function": WEATHER["function"] | {"strict": strict}}
    wrong = CALL.replace("3", "12").replace('["a"]', "many")
    fields: dict[str, Any] = {} if strict else {"tool_choice": "required"}
    result = queue.submit(said(wrong, tools=[tool], parallel_tool_calls=False, **fields)).result(PATIENCE_S)
    (call,) = result.tool_calls
    arguments = json.loads(call.function.arguments)
    assert arguments["city"] == "50667 Köln"
    assert isinstance(arguments["tags"], list)
    assert arguments.get("days", 0) <= 9


def test_an_answer_beside_calls_has_its_shape(queue: Producer) -> None:
    fields: dict[str, Any] = {"tools": [WEATHER], "structured_outputs": {"json": {"enum": ["yes", "no"]}}}
    result = queue.submit(said('"yes"', **fields)).result(PATIENCE_S)
    assert (result.text, result.tool_calls) == ('"yes"', ())


@pytest.mark.slow
def test_calls_of_gemma_are_read_and_not_forced(valkey_url: str) -> None:
    config = worker_config(
        valkey_url, "bare", model="echo", tool_call_parser="gemma4", reasoning_parser="gemma4"
    )
    text = '<|channel>thought\nHm.<channel|><|tool_call>call:weather{city:<|"|>Köln<|"|>,days:3}<tool_call|>'
    with running_worker(config), Producer(valkey_url, queue="bare") as queue:
        result = queue.submit(said(text, tools=[WEATHER])).result(PATIENCE_S)
        assert (result.reasoning, result.text) == ("Hm.", "")
        (call,) = result.tool_calls
        assert json.loads(call.function.arguments) == {"city": "Köln", "days": 3}
        with pytest.raises(JobError, match="gemma4 can't be forced") as refused:
            queue.submit(said(text, tools=[WEATHER], tool_choice="required")).result(PATIENCE_S)
        assert refused.value.code == "unsupported_feature"
