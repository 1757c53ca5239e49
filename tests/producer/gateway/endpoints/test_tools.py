"""Tools, reasoning and responses as the openai package requests them; the echo model repeats the prompt."""

from __future__ import annotations

import json
from typing import Any, Literal

import openai
import pytest
from openai import OpenAI
from pydantic import BaseModel, ConfigDict

from tests.producer.gateway.serving import Served, gateway
from tests.producer.gateway.weather import ANSWER, BETWEEN, FLAT, PARAMETERS, WEATHER
from tests.worker.harness import PATIENCE_S

ASK: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": ANSWER}],
    "max_tokens": 400,
    "temperature": 0.0,
    "tools": [WEATHER],
}


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    return {"model": "echo", "tool_call_parser": "hermes", "reasoning_parser": "think"}


def test_calls_and_thinking_are_fields_of_the_message(client: OpenAI) -> None:
    answer = client.chat.completions.create(**ASK)
    choice = answer.choices[0]
    assert choice.finish_reason == "tool_calls"
    assert choice.message.content == "Let me look."
    assert choice.message.model_extra == {"reasoning": "Where?", "reasoning_content": "Where?"}
    calls: Any = choice.message.tool_calls
    assert [(call.function.name, json.loads(call.function.arguments)) for call in calls] == [
        ("weather", {"city": "Rome"})
    ] * 2
    assert len({call.id for call in calls}) == 2
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    assert answer.usage.completion_tokens_details.reasoning_tokens == len("<think>\nWhere?\n</think>")


def test_a_stream_adds_up_to_the_answer(client: OpenAI) -> None:
    whole = client.chat.completions.create(**ASK).choices[0].message
    chunks = list(client.chat.completions.create(**ASK, stream=True, logprobs=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.content
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "Where?"
    calls: dict[int, dict[str, str]] = {}
    for part in (part for delta in deltas for part in delta.tool_calls or ()):
        assert part.function is not None
        if part.id is not None:
            assert part.type == "function"
            calls[part.index] = {"id": part.id, "name": part.function.name or "", "arguments": ""}
        calls[part.index]["arguments"] += part.function.arguments or ""
    assert [call["name"] for call in calls.values()] == ["weather", "weather"]
    assert [json.loads(call["arguments"]) for call in calls.values()] == [{"city": "Rome"}] * 2
    assert chunks[-1].choices[0].finish_reason == "tool_calls"
    tokens = [
        token
        for chunk in chunks
        for choice in chunk.choices
        for token in (choice.logprobs and choice.logprobs.content) or ()
    ]
    assert bytes(byte for token in tokens for byte in token.bytes or ()).startswith(ANSWER.encode())


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_valid(client: OpenAI, choice: Any) -> None:
    ask = ASK | {"messages": [{"role": "user", "content": "words"}]}
    answer = client.chat.completions.create(**ask, tool_choice=choice).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    (call,) = answer.message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


def test_a_conversation_goes_on_with_what_was_answered(client: OpenAI) -> None:
    message = client.chat.completions.create(**ASK).choices[0].message
    turns = [
        *ASK["messages"],
        message.model_dump(),
        *({"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls or ()),
    ]
    ask = ASK | {"messages": turns, "tool_choice": "none", "max_tokens": 500}
    answer = client.chat.completions.create(**ask).choices[0]
    assert answer.finish_reason == "stop"
    assert (answer.message.content or "").endswith("Let me look.\nsun\nsun\n")


class City(BaseModel):
    model_config = ConfigDict(extra="forbid")

    city: Literal["Rome", "Oslo"]


@pytest.mark.filterwarnings("ignore::UserWarning")  # of openai's dump of `parsed`
def test_a_conversation_continues_with_answers_of_the_client_s_helpers(client: OpenAI) -> None:
    chats: Any = client.chat.completions
    tool = openai.pydantic_function_tool(City)
    forced = ASK | {"tools": [tool], "tool_choice": "required"}
    parsed = chats.parse(model="echo", messages=ASK["messages"], response_format=City, max_tokens=400)
    called = chats.parse(**forced)
    with chats.stream(**forced) as stream:
        streamed = stream.get_final_completion()
    assert parsed.choices[0].message.parsed
    for answer in (called, streamed):
        assert answer.choices[0].message.tool_calls[0].function.parsed_arguments
    for answer in (parsed, called, streamed):
        message = answer.choices[0].message
        results = [
            {"role": "tool", "tool_call_id": call.id, "content": "sun"} for call in message.tool_calls or ()
        ]
        for turn in (message, message.model_dump(mode="json")):
            turns = [{"role": "user", "content": "and?"}, turn, *results]
            assert chats.create(model="echo", messages=turns, tools=[tool]).choices[0].message.content


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"functions": [{"name": "f"}]}, "functions", "use tools"),
        ({"tools": [{"type": "web_search"}]}, "tools.0.type", "function"),
        ({"tools": [WEATHER, WEATHER]}, "tools", "two functions have one name"),
        ({"tool_choice": {"type": "function", "function": {"name": "g"}}}, "tool_choice", "tools lack"),
        ({"extra_body": {"thinking_budget": 3}}, "thinking_budget", "use thinking_token_budget"),
        (
            {"extra_body": {"chat_template_kwargs": {"chat_template": "x"}}},
            "chat_template_kwargs",
            "not a template's",
        ),
        ({"extra_body": {"chat_template_kwargs": {"x": "y" * 5000}}}, "chat_template_kwargs", "4096 bytes"),
        ({"tool_choice": "required", "extra_body": {"guided_regex": "x"}}, None, "function's schema"),
    ],
)
def test_what_is_refused_says_what_to_use(
    client: OpenAI, fields: dict[str, Any], param: str | None, hint: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=hint) as refused:
        client.chat.completions.create(**ASK | fields)
    assert refused.value.param == param


RESPOND: dict[str, Any] = {
    "model": "echo",
    "input": ANSWER,
    "max_output_tokens": 400,
    "temperature": 0.0,
    "tools": [FLAT],
}


def test_a_response(client: OpenAI) -> None:
    response = client.responses.create(**RESPOND)
    assert (response.object, response.status, response.output_text) == (
        "response",
        "completed",
        "Let me look.",
    )
    assert [item.type for item in response.output] == [
        "reasoning",
        "message",
        "function_call",
        "function_call",
    ]
    call: Any = response.output[2]
    assert (call.name, json.loads(call.arguments)) == ("weather", {"city": "Rome"})
    assert response.usage is not None
    assert response.usage.output_tokens_details.reasoning_tokens > 0
    following = client.responses.create(
        model="echo",
        instructions="Be brief.",
        input=[
            {"role": "user", "content": [{"type": "input_text", "text": "hello"}]},
            *response.output,  # type: ignore[list-item]
            {"type": "function_call_output", "call_id": call.call_id, "output": "sun"},
        ],
        max_output_tokens=400,
        temperature=0.0,
    )
    assert following.output_text == "Be brief.\nhello\nLet me look.\nsun\n"


def test_a_response_is_streamed(client: OpenAI) -> None:
    """The client's own accumulation checks the order of events and their indices."""
    with client.responses.stream(**RESPOND) as stream:
        events = list(stream)
        final = stream.get_final_response()
    whole = client.responses.create(**RESPOND)
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    assert {"response.reasoning_text.delta", "response.function_call_arguments.done"} <= set(kinds)
    assert [item.type for item in final.output] == [item.type for item in whole.output]
    assert final.output_text == whole.output_text
    assert [event.sequence_number for event in events if hasattr(event, "sequence_number")]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    assert [item.type for item in done] == [item.type for item in whole.output]
    assert [item.arguments for item in done if item.type == "function_call"] == [
        item.arguments for item in whole.output if item.type == "function_call"
    ]


def test_a_stream_with_text_between_calls_agrees_with_its_final_response(client: OpenAI) -> None:
    with client.responses.stream(**RESPOND | {"input": BETWEEN}) as stream:
        events = list(stream)
        accumulated = stream.get_final_response()
    final = events[-1].response  # type: ignore[union-attr]
    done = [event.item for event in events if event.type == "response.output_item.done"]
    # Events that the worker has merged contain text and calls, so the number of messages can differ.
    assert [item.type for item in done if item.type != "message"] == ["reasoning", *["function_call"] * 2]
    for response in (final, accumulated):
        assert [(item.id, item.type) for item in response.output] == [(item.id, item.type) for item in done]
    assert len({item.id for item in done}) == len(done)
    whole = client.responses.create(**RESPOND | {"input": BETWEEN})
    assert final.output_text == whole.output_text == "Let me look.\nAnd there.\nDone."


@pytest.mark.parametrize("is_stream", [False, True])
def test_reasoning_without_an_answer_has_no_message(client: OpenAI, is_stream: bool) -> None:
    ask = RESPOND | {"input": "<think>\nWhere?", "max_output_tokens": 12, "stream": is_stream}
    answer = client.responses.create(**ask)
    response = list(answer)[-1].response if is_stream else answer
    assert [(item.type, item.status) for item in response.output] == [("reasoning", "incomplete")]


def test_nulls_in_options_of_a_response_are_as_if_omitted(client: OpenAI) -> None:
    options: dict[str, Any] = {
        "stream_options": {"include_obfuscation": None},
        "reasoning": {"effort": None, "summary": None, "generate_summary": None},
        "text": {"format": None, "verbosity": None},
    }
    events = list(client.responses.create(model="echo", input="x", stream=True, **options))
    assert events[-1].type == "response.completed"


def test_a_response_with_a_schema_and_one_that_is_cut(client: OpenAI) -> None:
    shape: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}}
    assert client.responses.create(model="echo", input="x", text=shape).output_text == '"yes"'
    cut = client.responses.create(model="echo", input="hello there", max_output_tokens=5)
    assert (cut.status, cut.output_text) == ("incomplete", "hello")
    assert cut.incomplete_details is not None
    assert cut.incomplete_details.reason == "max_output_tokens"


def test_a_response_has_all_fields_of_the_specification(client: OpenAI) -> None:
    """Required by the Open Responses schema, also in events; a tool has its fields even if they were not sent."""
    asked = {"presence_penalty": 0.5, "frequency_penalty": 0.25, "include": ["reasoning.encrypted_content"]}
    bare = {"type": "function", "name": "time"}
    raw = client.responses.with_raw_response.create(**RESPOND | {"tools": [bare], "extra_body": asked})
    whole = json.loads(raw.content)
    with client.responses.stream(**RESPOND) as stream:
        begun = next(iter(stream)).response.model_dump()  # type: ignore[union-attr]
    assert whole["completed_at"] >= whole["created_at"]
    assert begun["completed_at"] is None
    assert (whole["presence_penalty"], whole["frequency_penalty"]) == (0.5, 0.25)
    assert (begun["presence_penalty"], begun["frequency_penalty"], begun["top_p"]) == (0.0, 0.0, 1.0)
    assert whole["tools"] == [{**bare, "description": None, "parameters": None, "strict": True}]
    for body in (whole, begun):
        assert (body["background"], body["service_tier"], body["top_logprobs"]) == (False, "default", 0)
        nothing = {"max_tool_calls", "safety_identifier", "prompt_cache_key", "previous_response_id", "error"}
        assert {name for name in nothing if name in body and body[name] is None} == nothing


def test_a_forced_call_next_to_a_text_format(client: OpenAI) -> None:
    """As instructor's RESPONSES_TOOLS sends it: the function's schema decides."""
    shape: Any = {"format": {"type": "json_schema", "name": "n", "schema": {"enum": ["yes"]}}}
    for choice in ("required", {"type": "function", "name": "weather"}):
        response = client.responses.create(**RESPOND | {"input": "words"}, text=shape, tool_choice=choice)
        (call,) = response.output
        assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("fields", "param", "hint"),
    [
        ({"conversation": "conv_1"}, "conversation", "send previous_response_id"),
        ({"tools": [{"type": "web_search"}]}, "tools", "offer a function"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input.0", "send the item itself"),
        ({"background": True, "store": False}, "store", "background needs store: true"),
        ({"include": ["file_search_call.results"]}, "include", "chat/completions for log-prob"),
        ({"text": {"format": {"type": "grammar"}}}, "text.format", "json_schema"),
    ],
)
def test_a_response_that_needs_what_is_not_here_is_refused(
    client: OpenAI, fields: dict[str, Any], param: str, hint: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=hint) as refused:
        client.responses.create(**RESPOND | fields)
    assert refused.value.param == param


@pytest.mark.slow
def test_every_chat_s_thinking_can_be_apart(valkey_url: str, served: Served, queue: str) -> None:
    ask = {"model": "echo", "messages": [{"role": "user", "content": "<think>a</think>b"}], "max_tokens": 40}
    with (
        gateway(valkey_url, queue, separate_reasoning=True) as other,
        OpenAI(base_url=other.base_url, api_key="none", max_retries=0, timeout=PATIENCE_S) as client,
    ):
        message = client.chat.completions.create(**ask, temperature=0.0).choices[0].message  # type: ignore[call-overload]
    assert (message.content, message.model_extra["reasoning"]) == ("b\n", "a")


@pytest.mark.parametrize(
    "fields",
    [
        {"input": "hello"},
        {
            "input": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
            "instructions": "c",
        },
        {"input": ANSWER, "tools": [FLAT], "reasoning": {"effort": "low"}},
        {"input": "words", "tools": [FLAT], "tool_choice": "required"},
        {"input": "words", "text": {"format": {"type": "json_schema", "name": "s", "schema": PARAMETERS}}},
    ],
    ids=["text", "turns", "tools", "forced", "schema"],
)
def test_the_input_tokens_of_a_response_are_those_of_its_usage(
    client: OpenAI, fields: dict[str, Any]
) -> None:
    counted = client.responses.input_tokens.count(model="echo", **fields)
    assert counted.object == "response.input_tokens"
    response = client.responses.create(model="echo", max_output_tokens=40, temperature=0.0, **fields)
    assert response.usage is not None
    assert counted.input_tokens == response.usage.input_tokens > 0


@pytest.mark.slow
def test_input_tokens_of_what_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.responses.input_tokens.count(model="other", input="a")
    with pytest.raises(openai.NotFoundError, match="no response 'resp_1'"):
        client.responses.input_tokens.count(model="echo", input="a", previous_response_id="resp_1")
