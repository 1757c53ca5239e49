"""Tools and reasoning through the queue: the echo model repeats the prompt, so a prompt scripts the output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.wire.schema.errors import JobError
from pagemill.producer.wire.schema.text.chat import Tool
from tests.worker.harness import PATIENCE_S, eventually, running_worker, worker_config

WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Köln", "Rom"]}, "days": {"type": "integer"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
TIME = {"type": "function", "function": {"name": "time"}}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rom"}}\n</tool_call>'


@pytest.fixture(scope="module")
def queue(valkey_url: str) -> Iterator[Producer]:
    config = worker_config(
        valkey_url, "chats", model="echo", tool_call_parser="hermes", reasoning_parser="think", max_num_seqs=8
    )
    with running_worker(config), Producer(valkey_url, queue="chats") as queue:
        yield queue


def said(text: str, **fields: Any) -> dict[str, Any]:
    """A job whose output is `text`."""
    messages = [{"role": "user", "content": text}]
    return {"model": "echo", "messages": messages, "temperature": 0.0, "max_tokens": 400} | fields


def test_thinking_and_calls_are_apart(queue: Producer) -> None:
    text = f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\n"
    result = queue.submit(said(text, tools=[WEATHER])).result(PATIENCE_S)
    assert (result.reasoning, result.text) == ("Where?", "Let me look.")
    (call,) = result.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments) == {"city": "Rom"}
    assert result.usage.reasoning_tokens == len("<think>\nWhere?\n</think>")
    assert bytes(result.token_ids[:7]) == b"<think>"
    plain = queue.submit(said(text)).result(PATIENCE_S)
    assert plain.text == f"{text}\n"
    assert (plain.reasoning, plain.tool_calls, plain.usage.reasoning_tokens) == (None, (), None)


def test_a_stream_has_the_same_parts(queue: Producer) -> None:
    text = f"<think>a\nb</think>Now {CALL}{CALL}"
    handle = queue.submit(said(text, tools=[WEATHER], stream=True, logprobs=0))
    parts: dict[str, str] = {"text": "", "reasoning": ""}
    calls: dict[int, list[str]] = {}
    num_tokens = 0
    for event in handle.stream():
        if event.type == "snapshot":
            parts, calls, num_tokens = {"text": "", "reasoning": ""}, {}, 0
        parts["text"] += event.text
        parts["reasoning"] += event.reasoning
        num_tokens += len(event.token_ids)
        for part in event.tool_calls:
            if part.id is not None:
                calls[part.index] = [part.id, part.name or "", ""]
            calls[part.index][2] += part.arguments
    result = handle.result(PATIENCE_S)
    assert parts == {"text": result.text, "reasoning": result.reasoning}
    assert parts == {"text": "Now", "reasoning": "a\nb"}
    assert list(calls.values()) == [
        [call.id, call.function.name, call.function.arguments] for call in result.tool_calls
    ]
    assert num_tokens == len(result.token_ids)
    assert len({call.id for call in result.tool_calls}) == 2


@pytest.mark.slow
@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "weather"}}])
def test_a_forced_call_is_valid(queue: Producer, choice: Any) -> None:
    tools = [WEATHER] if choice == "required" else [WEATHER, TIME]
    result = queue.submit(
        said("no calls here", tools=tools, tool_choice=choice, parallel_tool_calls=False)
    ).result(PATIENCE_S)
    assert result.text == ""
    (call,) = result.tool_calls
    assert call.function.name == "weather"
    assert json.loads(call.function.arguments)["city"] in ("Köln", "Rom")


def test_a_forced_call_follows_the_thinking(queue: Producer) -> None:
    text = "<think>I wonder whether <tool_call> is next.</think>So"
    result = queue.submit(said(text, tools=[TIME], tool_choice="required", parallel_tool_calls=False)).result(
        PATIENCE_S
    )
    assert result.reasoning == "I wonder whether <tool_call> is next."
    assert [call.function.name for call in result.tool_calls] == ["time"]
    assert json.loads(result.tool_calls[0].function.arguments) == {}


@pytest.mark.parametrize(
    "structure", [{"choice": ["yes", "no"]}, {"regex": "yes|no"}, {"json": {"enum": ["yes", "no"]}}]
)
@pytest.mark.parametrize("thoughts", ["<think>Is it {a}?</think>", ""])
def test_a_structure_begins_after_the_thinking(
    queue: Producer, structure: dict[str, Any], thoughts: str
) -> None:
    job = said(thoughts + "no.", structured_outputs=structure, separate_reasoning=True, max_tokens=60)
    result = queue.submit(job).result(PATIENCE_S)
    assert result.reasoning == ("Is it {a}?" if thoughts else None)
    assert result.text.strip('"') in ("yes", "no")
    assert result.outputs[0].parsed == (json.loads(result.text) if "json" in structure else None)


@pytest.mark.parametrize("budget", [0, 4])
@pytest.mark.parametrize("structure", [None, {"choice": ["yes", "no"]}])
def test_the_thinking_has_a_budget(queue: Producer, budget: int, structure: Any) -> None:
    job = said(
        "<think>this goes on for a long time", thinking_token_budget=budget, structured_outputs=structure
    )
    result = queue.submit(job).result(PATIENCE_S)
    assert (result.reasoning or "") == "this goes on"[:budget].strip()
    assert result.usage.reasoning_tokens == len("<think></think>") + budget
    assert structure is None or result.text in ("yes", "no")


def test_a_strict_call_is_held_to_its_schema_once_it_begins(queue: Producer) -> None:
    strict = {"type": "function", "function": WEATHER["function"] | {"strict": True}}  # type: ignore[operator]
    text = 'Words. <tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
    result = queue.submit(said(text, tools=[strict, TIME], parallel_tool_calls=False)).result(PATIENCE_S)
    assert result.text == "Words."
    assert json.loads(result.tool_calls[0].function.arguments)["city"] in ("Köln", "Rom")
    free = queue.submit(said(text, tools=[WEATHER])).result(PATIENCE_S)
    assert json.loads(free.tool_calls[0].function.arguments)["city"] == "Oslo"
    words = queue.submit(said("No call at all.", tools=[strict])).result(PATIENCE_S)
    assert (words.text, words.tool_calls) == ("No call at all.\n", ())
    several = queue.submit(said(f"{text}{text}", tools=[strict], max_tokens=300)).result(PATIENCE_S)
    assert len(several.tool_calls) >= 2
    for call in several.tool_calls[:2]:
        assert json.loads(call.function.arguments)["city"] in ("Köln", "Rom")


def test_a_choice_of_none_neither_shows_nor_finds_tools(queue: Producer) -> None:
    result = queue.submit(said(CALL, tools=[WEATHER], tool_choice="none")).result(PATIENCE_S)
    assert (result.text, result.tool_calls) == (f"{CALL}\n", ())


def test_a_history_of_calls_is_shown_to_the_model(queue: Producer) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "now", "tool_call_id": "call_1"},
    ]
    result = queue.submit(model="echo", messages=messages, max_tokens=40, temperature=0.0).result(PATIENCE_S)
    assert result.text == "When?\n\nnow\n"


@pytest.mark.slow
def test_what_the_model_cannot_do_is_refused(valkey_url: str) -> None:
    config = worker_config(valkey_url, "bare", model="echo", tool_call_parser="none")
    with running_worker(config), Producer(valkey_url, queue="bare") as queue:
        for fields, hint in (
            ({"tools": [TIME]}, "tool_call_parser set to one of"),
            ({"thinking_token_budget": 4}, "use max_tokens"),
        ):
            with pytest.raises(JobError, match=hint) as refused:
                queue.submit(said("x", **fields)).result(PATIENCE_S)
            assert refused.value.code == "unsupported_feature"


@pytest.mark.slow
@pytest.mark.parametrize("structure", [None, {"json": {"const": "yes"}}])
def test_another_worker_goes_on_with_the_thinking(valkey_url: str, queue_name: str, structure: Any) -> None:
    """The checkpoint is text as generated: the next worker determines its position in the outline."""
    config = {"model": "echo:10", "tool_call_parser": "hermes", "reasoning_parser": "think"}
    text = "<think>" + "0123456789" * 15 + "</think>"
    job = said(text + "yes", separate_reasoning=True, structured_outputs=structure, stream=True)
    with Producer(valkey_url, queue=queue_name) as queue:
        with running_worker(worker_config(valkey_url, queue_name, **config)):
            handle = queue.submit(job)
            eventually(lambda: handle.progress().generated_tokens >= 20, "a checkpoint")
        assert not handle.status().done
        half = next(iter(handle.stream()))
        assert half.reasoning
        assert half.text == ""
        with running_worker(worker_config(valkey_url, queue_name, **config)):
            result = handle.result(PATIENCE_S)
    assert result.resumed_tokens >= 20
    assert result.reasoning == "0123456789" * 15
    assert result.text == ('"yes"' if structure else "yes\n")


@pytest.mark.slow
def test_what_a_cancelled_job_leaves_is_parsed_too(valkey_url: str, queue_name: str) -> None:
    config = worker_config(valkey_url, queue_name, model="echo:10", reasoning_parser="think")
    with running_worker(config), Producer(valkey_url, queue=queue_name) as queue:
        handle = queue.submit(said("<think>" + "0123456789" * 30, separate_reasoning=True))
        eventually(lambda: handle.progress().generated_tokens >= 20, "a checkpoint")
        handle.cancel()
        with pytest.raises(JobError) as cancelled:
            handle.result(PATIENCE_S)
    (partial,) = cancelled.value.partial
    assert (partial.reasoning or "").startswith("0123456789")
    assert partial.text == ""


@pytest.mark.slow
def test_a_batch_of_rows_has_the_same_form(valkey_url: str, queue: Producer) -> None:
    """The fast path of bulk submits: rows with tools, and rows with a history among plain ones."""
    call = {"id": "call_1", "type": "function", "function": {"name": "time", "arguments": "{}"}}
    history = {"role": "assistant", "tool_calls": [call]}
    rows = [
        said(f"<think>{number}</think>{CALL}", tools=[TIME], key=f"tools-{number}") for number in range(4)
    ]
    plain = [said(f"{number}", key=f"plain-{number}") for number in range(3)]
    plain[0]["messages"] = [*plain[0]["messages"], history]
    items = {item.key: item for item in queue.submit_many([*rows, *plain]).results()}
    for number in range(4):
        result = items[f"tools-{number}"].result
        assert result is not None
        assert (result.reasoning, len(result.tool_calls)) == (str(number), 1)
    texts = [items[f"plain-{number}"].result for number in range(3)]
    assert [one.text for one in texts if one is not None] == ["0\n\n", "1\n", "2\n"]


@pytest.mark.slow
def test_a_dataset_s_rows_hold_calls_and_thinking(queue: Producer, tmp_path: Path) -> None:
    source, out = tmp_path / "rows.jsonl", tmp_path / "out.jsonl"
    lines = [{"text": f"<think>{number}</think>{CALL if number else 'no'}"} for number in range(2)]
    source.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    pipeline = Pipeline("{{ text }}", model="echo", tools=[Tool.model_validate(WEATHER)], max_tokens=400)
    for _ in range(2):  # the second finds all of it done
        summary = pipeline.run(source, out=out, producer=queue)
        assert summary.failed == 0
        plain, called = (json.loads(line) for line in out.read_text().splitlines())
        assert plain["output"] == "no\n"
        assert called["output"]["content"] == ""
        assert called["output"]["tool_calls"][0]["function"]["name"] == "weather"
        assert (plain["_pagemill"]["reasoning"], called["_pagemill"]["reasoning"]) == ("0", "1")
