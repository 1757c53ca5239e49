"""Tool calls in elements as the openai package sees them; the echo model repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import pytest
from openai import OpenAI

PROPERTIES = {"city": {"type": "string"}, "days": {"type": "integer"}}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "weather", "parameters": {"type": "object", "properties": PROPERTIES}},
}
CALL = (
    '<minimax:tool_call>\n<invoke name="weather">\n<parameter name="city">50667 "Köln"</parameter>\n'
    '<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>'
)
ASK: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": f"<think>Hm.</think>I look.{CALL}"}],
    "max_tokens": 400,
    "temperature": 0.0,
    "tools": [WEATHER],
}


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    return {"model": "echo", "tool_call_parser": "minimax_m2", "reasoning_parser": "think"}


@pytest.mark.slow
def test_arguments_are_json_of_the_schema_s_types(client: OpenAI) -> None:
    choice = client.chat.completions.create(**ASK).choices[0]
    assert (choice.finish_reason, choice.message.content) == ("tool_calls", "I look.")
    (call,) = choice.message.tool_calls or ()
    arguments = call.function.arguments  # type: ignore[union-attr]
    assert json.loads(arguments) == {"city": '50667 "Köln"', "days": 3}
    chunks = list(client.chat.completions.create(**ASK, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    parts = [
        part.function for delta in deltas for part in delta.tool_calls or () if part.function is not None
    ]
    assert "".join(part.arguments or "" for part in parts) == arguments
    assert [part.name for part in parts if part.name] == ["weather"]
    assert "".join(delta.content or "" for delta in deltas) == "I look."
