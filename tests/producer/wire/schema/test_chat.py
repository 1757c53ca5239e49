"""Fields of chats with tools: the resulting version, the hash, and the rejections."""

from __future__ import annotations

from typing import Any

import pytest

from pagemill import InvalidJob, Job
from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS

TURNS: list[Any] = [{"role": "user", "content": "x"}]
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
FIELDS: dict[str, Any] = {
    "tools": [TOOL],
    "tool_choice": "auto",
    "parallel_tool_calls": True,
    "chat_template_kwargs": {"enable_thinking": False},
    "reasoning_effort": "low",
    "thinking_token_budget": 0,
    "separate_reasoning": True,
}
HISTORY: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [CALL]},
    {"role": "tool", "content": "y", "tool_call_id": "c"},
    {"role": "assistant", "content": "y", "reasoning": "z"},
]


def job(**fields: Any) -> Job:
    return Job.parse({"model": "m", "messages": TURNS, "temperature": 0.0} | fields)


def test_every_field_is_tried() -> None:
    assert FIELDS.keys() == CHAT_FIELDS


@pytest.mark.parametrize("name", FIELDS)
def test_any_of_the_fields_makes_another_form_of_results_and_another_digest(name: str) -> None:
    plain, asked = job(), job(**{name: FIELDS[name]})
    assert (plain.is_parsed, asked.is_parsed) == (False, True)
    assert plain.digest() != asked.digest()
    assert Job.from_payload(asked.to_payload()) == asked


@pytest.mark.parametrize("turn", HISTORY)
def test_so_does_a_message_of_the_later_form(turn: dict[str, Any]) -> None:
    asked = job(messages=[*TURNS, turn])
    assert asked.is_parsed
    bare = job(messages=[*TURNS, {"role": turn["role"], "content": turn["content"] or ""}])
    assert not bare.is_parsed
    assert asked.digest() != bare.digest()
    assert asked.cost_tokens() > bare.cost_tokens()
    assert Job.from_payload(asked.to_payload()) == asked


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"tool_choice": "required"}, "needs tools"),
        ({"tools": [TOOL, TOOL]}, "one name"),
        ({"tools": []}, "tools"),
        ({"tools": [TOOL] * 129}, "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "name"),
        ({"tools": [TOOL], "tool_choice": {"function": {"name": "g"}}}, "lack"),
        ({"thinking_token_budget": -1}, "thinking_token_budget"),
        ({"reasoning_effort": "huge"}, "reasoning_effort"),
        ({"chat_template_kwargs": {"tokenize": True}}, "tokenize is not a template's"),
        ({"chat_template_kwargs": {"a": "x" * 4096}}, "4096 bytes"),
        ({"chat_template_kwargs": {"a": float("nan")}}, "finite"),
        ({"messages": [{"role": "user", "content": None}]}, "content is missing"),
        ({"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]}, "assistant's"),
        ({"messages": [{"role": "user", "content": "x", "tool_call_id": "c"}]}, "tool's message"),
        ({"task": "score", "temperature": 1.0, "messages": [*TURNS, HISTORY[0]]}, "generate job"),
        ({"task": "score", "temperature": 1.0, "tools": [TOOL]}, "score job cannot have tools"),
        ({"messages": None, "prompt": "x", "tools": [TOOL]}, "need messages"),
        ({"beam_width": 2, "temperature": 1.0, "thinking_token_budget": 3}, "beam search"),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        job(**fields)
