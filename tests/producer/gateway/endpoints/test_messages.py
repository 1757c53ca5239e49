"""Anthropic's interface as the anthropic package uses it; the echo model repeats the prompt."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import pytest
from anthropic import Anthropic

from pagemill.producer.anthropic.messages import read_message
from pagemill.producer.openai.formats import CHAT_URL, read_job
from pagemill.producer.wire.schema.errors import InvalidJob
from tests.producer.gateway.serving import Served, gateway, write_keys
from tests.producer.gateway.weather import ANSWER, BETWEEN, PARAMETERS
from tests.worker.harness import PATIENCE_S

TOOL: Any = {"name": "weather", "description": "The weather.", "input_schema": PARAMETERS}
ASK: dict[str, Any] = {
    "model": "echo",
    "messages": [{"role": "user", "content": ANSWER}],
    "max_tokens": 400,
    "extra_body": {"temperature": 0.0, "top_p": 1.0, "top_k": 0},
    "tools": [TOOL],
}


@pytest.fixture(scope="module")
def worker_settings() -> dict[str, Any]:
    return {"model": "echo:2", "tool_call_parser": "hermes", "reasoning_parser": "think"}


def connect(served: Served, key: str = "none") -> Anthropic:
    return Anthropic(base_url=served.url, api_key=key, max_retries=0, timeout=PATIENCE_S)


@pytest.fixture(scope="module")
def claude(served: Served) -> Iterator[Anthropic]:
    with connect(served) as client:
        yield client


def test_a_message_has_blocks_of_thinking_text_and_calls(claude: Anthropic) -> None:
    message = claude.messages.create(**ASK)
    assert (message.type, message.role, message.model, message.stop_reason) == (
        *("message", "assistant", "echo"),
        "tool_use",
    )
    thinking, text, first, second = message.content
    assert (thinking.type, text.type, first.type) == ("thinking", "text", "tool_use")
    assert (thinking.thinking, text.text) == ("Where?", "Let me look.")  # type: ignore[union-attr]
    assert (first.name, first.input) == ("weather", {"city": "Rome"})  # type: ignore[union-attr]
    assert first.id != second.id  # type: ignore[union-attr]
    assert message.usage.output_tokens > 0
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > 0


@pytest.mark.slow
def test_a_stream_gives_the_same_message(claude: Anthropic) -> None:
    """The client's own accumulation checks the order of events."""
    whole = claude.messages.create(**ASK)
    with claude.messages.stream(**ASK) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_message()
    assert kinds[0] == "message_start"
    assert kinds[-1] == "message_stop"
    assert kinds.count("content_block_start") == kinds.count("content_block_stop") == 4
    without_ids = [block.model_dump(exclude={"id", "parsed_output", "citations"}) for block in final.content]
    assert without_ids == [block.model_dump(exclude={"id", "citations"}) for block in whole.content]
    assert final.stop_reason == whole.stop_reason
    assert final.usage.output_tokens == whole.usage.output_tokens
    assert not any("citations" in block.model_fields_set for block in whole.content), (
        "some clients reject null"
    )


def test_a_stream_with_text_between_calls(claude: Anthropic) -> None:
    with claude.messages.stream(**ASK | {"messages": [{"role": "user", "content": BETWEEN}]}) as stream:
        final = stream.get_final_message()
    kinds = [block.type for block in final.content if block.type != "text"]
    assert kinds == ["thinking", "tool_use", "tool_use"]
    assert "".join(block.text for block in final.content if block.type == "text") == (
        "Let me look.\nAnd there.\nDone."
    )
    assert [block.input for block in final.content if block.type == "tool_use"] == [{"city": "Rome"}] * 2


def test_an_empty_system_text_is_none_and_a_forced_call_needs_tools() -> None:
    ask = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    for system in ("", [], [{"type": "text", "text": ""}]):
        assert read_message(ask | {"system": system})["messages"] == ask["messages"]
    for choice in ({"type": "any"}, {"type": "tool", "name": "f"}):
        with pytest.raises(InvalidJob, match="needs tools"):
            read_message(ask | {"tools": [], "tool_choice": choice})
    assert "tool_choice" not in read_message(ask | {"tool_choice": {"type": "auto"}})


def test_a_conversation_with_results_of_tools(claude: Anthropic) -> None:
    called = claude.messages.create(**ASK)
    results: list[Any] = [
        {"type": "tool_result", "tool_use_id": called.content[2].id, "content": "sun"},  # type: ignore[union-attr]
        {"type": "tool_result", "tool_use_id": called.content[3].id,  # type: ignore[union-attr]
         "content": [{"type": "text", "text": "rain"}], "is_error": False},
        {"type": "text", "text": "So?"},
    ]  # fmt: skip
    following = claude.messages.create(
        model="echo",
        max_tokens=400,
        system=[{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        messages=[
            {"role": "user", "content": [{"type": "text", "text": "hello"}]},
            {"role": "assistant", "content": called.content},
            {"role": "user", "content": results},
        ],
    )
    assert following.content[0].text == "Be brief.\nhello\nLet me look.\nsun\nrain\nSo?\n"  # type: ignore[union-attr]
    assert following.stop_reason == "end_turn"


def test_forced_calls_schemas_and_limits(claude: Anthropic) -> None:
    choices: list[Any] = [
        {"type": "any"},
        {"type": "tool", "name": "weather", "disable_parallel_tool_use": True},
    ]
    for choice in choices:
        words: Any = [{"role": "user", "content": "words"}]
        (call,) = claude.messages.create(**ASK | {"messages": words, "tool_choice": choice}).content
        assert call.input["city"] in ("Rome", "Oslo")  # type: ignore[union-attr, index]
    plain: dict[str, Any] = {"model": "echo", "messages": [{"role": "user", "content": "one two three"}]}
    form = {"format": {"type": "json_schema", "schema": {"enum": ["yes"]}}}
    text: Any = claude.messages.create(**plain, max_tokens=20, output_config=form).content[0]  # type: ignore[arg-type]
    assert json.loads(text.text) == "yes"
    cut = claude.messages.create(**plain, max_tokens=3)
    assert cut.stop_reason == "max_tokens"
    stopped: Any = claude.messages.create(**plain, max_tokens=40, stop_sequences=["two"])
    assert (stopped.content[0].text, stopped.stop_reason) == ("one ", "end_turn")


CONTINUED = {"add_generation_prompt": False, "continue_final_message": True}


@pytest.mark.parametrize(
    ("last", "opens"),
    [
        ({"role": "assistant", "content": "The answer is"}, CONTINUED),
        ({"role": "assistant", "content": [{"type": "text", "text": "It is"}]}, CONTINUED),
        ({"role": "assistant", "content": ""}, {}),
        ({"role": "assistant", "content": [{"type": "tool_use", "id": "c", "name": "f", "input": {}}]}, {}),
        ({"role": "user", "content": "And?"}, {}),
        ({"role": "user", "content": []}, {}),
    ],
    ids=repr,
)
def test_the_answer_continues_what_the_assistant_has_begun(last: Any, opens: dict[str, bool]) -> None:
    first = {"role": "user", "content": "Why?"}
    chat = read_message({"model": "m", "max_tokens": 4, "messages": [first, last]})
    assert {name: chat[name] for name in CONTINUED if name in chat} == opens
    read_job(CHAT_URL, chat)


def test_kept_thinking_needs_no_management_of_the_context() -> None:
    ask = {"model": "m", "max_tokens": 4, "messages": [{"role": "user", "content": "x"}]}
    kept = {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}
    assert read_message(ask | {"context_management": kept}) == read_message(ask)
    with pytest.raises(InvalidJob, match="this value of context_management is not supported"):
        read_message(ask | {"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}})


def test_the_tokens_of_a_prompt(claude: Anthropic) -> None:
    fields: dict[str, Any] = {"system": "Be brief.", "messages": [{"role": "user", "content": "hello"}]}
    counted = claude.messages.count_tokens(model="echo", **fields)
    usage = claude.messages.create(model="echo", max_tokens=5, **fields).usage
    assert counted.input_tokens == usage.input_tokens + (usage.cache_read_input_tokens or 0) > 0


@pytest.mark.parametrize(
    ("fields", "hint"),
    [
        (
            {"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]},
            "an image must be in a user's message, with a base64 or url source",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "document", "source": {}}]}]},
            "documents are not supported yet",
        ),
        ({"messages": [{"role": "user", "content": [{"type": "x"}]}]}, "only text"),
        ({"messages": [{"role": "robot", "content": "x"}]}, "messages.0 should have a role"),
        ({"messages": []}, "1 to 1024 items"),
        ({"messages": [{"role": "assistant", "content": [{"type": "tool_use", "id": "a"}]}]}, "only text"),
        ({"tools": [{"type": "web_search_20250305", "name": "web_search"}]}, "tools.0: only functions"),
        ({"tool_choice": {"type": "some"}}, "tool_choice should have type"),
        ({"thinking": {"type": "between_tools"}}, "thinking should have type"),
        ({"output_config": {"format": {"type": "xml"}}}, "output_config.format"),
        ({"output_config": {"x": 1}}, "only effort and format"),
        ({"extra_body": {"container": "c"}}, "parameter container is not supported"),
        ({"extra_body": {"temperature": -1.0}}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"system": [{"type": "text", "text": 5}]}, "system.0"),
    ],
)
def test_what_is_not_supported_is_named(claude: Anthropic, fields: dict[str, Any], hint: str) -> None:
    with pytest.raises(anthropic.BadRequestError, match=hint) as refused:
        claude.messages.create(**ASK | fields)
    assert refused.value.body["error"]["type"] == "invalid_request_error"  # type: ignore[index]


@pytest.mark.slow
def test_errors_have_anthropics_form(
    valkey_url: str, served: Served, claude: Anthropic, tmp_path: Path
) -> None:
    with pytest.raises(anthropic.NotFoundError):
        claude.messages.create(**ASK | {"model": "other"})
    for body in (b"{torn", b"[]", b'{"model": "echo", "messages": [{"role": "user", "content": "x"}]}'):
        headers = {"content-type": "application/json"}
        raw = httpx.post(f"{served.base_url}/messages", content=body, headers=headers, timeout=PATIENCE_S)
        assert (raw.status_code, raw.json()["type"], raw.json()["error"]["type"]) == (
            *(400, "error"),
            "invalid_request_error",
        )
    made = write_keys(tmp_path / "keys.json", red={"tenant": "red"})
    queue = f"q-{uuid.uuid4().hex[:12]}"
    with gateway(valkey_url, queue, keys_path=tmp_path / "keys.json", models=("m",)) as guarded:
        with connect(guarded, "pm-wrong") as client, pytest.raises(anthropic.AuthenticationError):
            client.messages.create(**ASK)
        with connect(guarded, made["red"]) as client, pytest.raises(anthropic.APIStatusError) as late:
            client.messages.create(**ASK | {"model": "m"}, extra_headers={"x-request-timeout": "0.2"})
    assert late.value.status_code == 504


def test_the_billing_of_claude_code_is_not_part_of_the_prompt() -> None:
    """It differs in every request, so no prefix of a prompt would be in the cache."""
    ask = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": "x"}]}
    line = "x-anthropic-billing-header: cc_version=2.1; cch=0f3a1;"
    for system in (
        [{"type": "text", "text": line}, {"type": "text", "text": "Be brief."}],
        f"{line}\nBe brief.",
    ):
        assert read_message(ask | {"system": system})["messages"][0]["content"] == "Be brief."
    assert read_message(ask | {"system": line})["messages"] == ask["messages"]


def test_clients_learn_that_there_are_no_threads(served: Served) -> None:
    body = ASK | {"thread": {"type": "create"}}
    answer = httpx.post(f"{served.base_url}/messages", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert answer.json()["error"]["details"]["error_code"] == "thread_unsupported_request"
    assert answer.headers["request-id"] == answer.headers["x-request-id"]


def test_errors_before_the_endpoint_have_anthropics_form(served: Served) -> None:
    with httpx.Client(base_url=served.base_url, timeout=PATIENCE_S) as client:
        compressed = client.post("/messages", headers={"content-encoding": "gzip"}, content=b"x")
        for answer, status in ((compressed, 415), (client.get("/messages"), 405)):
            found = (answer.status_code, answer.json()["type"], answer.json()["error"]["type"])
            assert found == (status, "error", "invalid_request_error")


def test_models_in_anthropics_form(claude: Anthropic) -> None:
    (model,) = claude.models.list().data
    assert (model.id, model.type, model.display_name) == ("echo", "model", "echo")
    assert claude.models.retrieve("echo").created_at == model.created_at


def test_a_call_that_max_tokens_cuts_off_is_no_finished_call(claude: Anthropic) -> None:
    call = '<tool_call>{"name": "weather", "arguments": {"city": "' + 200 * "x"
    fields = ASK | {"messages": [{"role": "user", "content": call}], "max_tokens": 120}
    assert claude.messages.create(**fields).stop_reason == "max_tokens"
    with claude.messages.stream(**fields) as stream:
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_a_forced_call_ignores_the_format_of_an_answer(claude: Anthropic) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    extra = ASK["extra_body"] | {"output_config": {"format": form}}
    message = claude.messages.create(**ASK | {"tool_choice": {"type": "any"}, "extra_body": extra})
    assert message.content[-1].type == "tool_use"


def test_names_of_tools_can_have_128_characters(claude: Anthropic) -> None:
    named = TOOL | {"name": "mcp__" + "x" * 123}
    assert claude.messages.create(**ASK | {"tools": [named]}).content
