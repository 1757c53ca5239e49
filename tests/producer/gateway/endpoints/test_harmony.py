"""gpt-oss' harmony as the openai package sees it; the echo model repeats the prompt."""

from __future__ import annotations

import json
from typing import Any

import openai
import pytest
from openai import OpenAI

from pagemill import Producer
from tests.producer.gateway.serving import Served
from tests.producer.gateway.weather import FLAT, PARAMETERS, WEATHER
from tests.worker.harness import PATIENCE_S

ANALYSIS = "<|channel|>analysis<|message|>Where?<|end|><|start|>assistant"
FINAL = "<|channel|>final<|message|>In Rome.<|return|>"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Rome"}<|call|>'
PREAMBLE = "<|channel|>commentary<|message|>I look.<|end|><|start|>assistant"
OPEN = "Where?<|end|><|start|>assistant"
"""An output whose reasoning was opened by the prompt."""


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    return {"model": "echo", "tool_call_parser": "harmony", "reasoning_parser": "harmony"}


def asked(text: str, **fields: Any) -> dict[str, Any]:
    messages = [{"role": "user", "content": text}]
    return {"model": "echo", "messages": messages, "max_tokens": 400, "temperature": 0.0} | fields


def test_a_plain_chat_has_its_channels_apart(client: OpenAI) -> None:
    answer = client.chat.completions.create(**asked(ANALYSIS + FINAL))
    (choice,) = answer.choices
    assert (choice.finish_reason, choice.message.content) == ("stop", "In Rome.")
    assert choice.message.model_extra == {"reasoning": "Where?", "reasoning_content": "Where?"}
    assert answer.usage is not None
    assert answer.usage.completion_tokens_details is not None
    thoughts = "<|channel|>analysis<|message|>Where?<|end|>"
    assert answer.usage.completion_tokens_details.reasoning_tokens == len(thoughts)


def test_a_stream_adds_up_to_the_answer(client: OpenAI) -> None:
    ask = asked(ANALYSIS + PREAMBLE + CALL, tools=[WEATHER], reasoning_effort="low")
    whole = client.chat.completions.create(**ask).choices[0]
    assert whole.finish_reason == "tool_calls"
    (call,) = whole.message.tool_calls or ()
    assert call.function.name == "weather"  # type: ignore[union-attr]
    chunks = list(client.chat.completions.create(**ask, stream=True))
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    assert "".join(delta.content or "" for delta in deltas) == whole.message.content == "I look."
    thoughts = [(delta.model_extra or {}).get("reasoning_content", "") for delta in deltas]
    assert "".join(thoughts) == "Where?"
    parts = [
        part.function for delta in deltas for part in delta.tool_calls or () if part.function is not None
    ]
    assert "".join(part.arguments or "" for part in parts) == call.function.arguments  # type: ignore[union-attr]
    assert json.loads(call.function.arguments) == {"city": "Rome"}  # type: ignore[union-attr]
    assert chunks[-1].choices[0].finish_reason == "tool_calls"


@pytest.mark.parametrize("thoughts", ["", "<|channel|>analysis<|message|>b<|end|>"])
def test_a_structure_holds_for_the_answer_alone(client: OpenAI, thoughts: str) -> None:
    schema = {"type": "json_schema", "json_schema": {"name": "s", "schema": PARAMETERS}}
    ask = asked(OPEN + thoughts + FINAL, response_format=schema)
    message = client.chat.completions.create(**ask).choices[0].message
    assert message.model_extra == {"reasoning": "Where?", "reasoning_content": "Where?"}
    assert json.loads(message.content or "")["city"] in ("Rome", "Oslo")


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_follows_the_reasoning(client: OpenAI, choice: Any) -> None:
    ask = asked(OPEN + FINAL, tools=[WEATHER], tool_choice=choice, parallel_tool_calls=True)
    answer = client.chat.completions.create(**ask).choices[0]
    assert answer.finish_reason == "tool_calls"
    assert answer.message.content is None
    assert answer.message.model_extra == {"reasoning": "Where?", "reasoning_content": "Where?"}
    (call,) = answer.message.tool_calls or ()
    assert json.loads(call.function.arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


def test_a_response_has_reasoning_and_a_strict_call(client: OpenAI) -> None:
    wrong = CALL.replace("Rome", "Bonn")
    response = client.responses.create(
        model="echo", input=OPEN + PREAMBLE + wrong, tools=[FLAT], reasoning={"effort": "high"},
        max_output_tokens=400, temperature=0.0,
    )  # fmt: skip
    kinds = {item.type: item for item in response.output}
    assert set(kinds) == {"reasoning", "message", "function_call"}
    assert response.output_text == "I look."
    assert json.loads(kinds["function_call"].arguments)["city"] in ("Rome", "Oslo")  # type: ignore[union-attr]


def test_an_effort_that_gpt_oss_does_not_know_is_refused(client: OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="knows low, medium, high, not minimal"):
        client.chat.completions.create(**asked("x", reasoning_effort="minimal"))


def test_jobs_have_the_same_parts(valkey_url: str, served: Served, queue: str) -> None:
    with Producer(valkey_url, queue=queue) as producer:
        plain = producer.submit(asked(ANALYSIS + FINAL, stream=True))
        events = list(plain.stream())
        result = plain.result(PATIENCE_S)
        assert (result.reasoning, result.text) == ("Where?", "In Rome.")
        streamed = ""
        for event in events:  # a late reader gets a snapshot first
            streamed = event.reasoning if event.type == "snapshot" else streamed + event.reasoning
        assert streamed == "Where?"
        prompt = producer.submit(model="echo", prompt=FINAL, max_tokens=400, temperature=0.0).result(
            PATIENCE_S
        )
        assert (prompt.reasoning, prompt.text) == (None, FINAL)
        budget = producer.submit(asked("a long thought", thinking_token_budget=6)).result(PATIENCE_S)
        assert budget.reasoning == "a long"
        label = asked("yes", structured_outputs={"choice": ["yes", "no"]}, label_probs="product")
        del label["max_tokens"]
        labeled = producer.submit(label).result(PATIENCE_S)
        assert labeled.outputs[0].label in ("yes", "no")
