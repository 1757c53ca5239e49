"""The objects in a request: each member is used, or rejected with its name."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, get_type_hints

import pytest
from openai.types import shared_params
from openai.types.chat import ChatCompletionContentPartImageParam, ChatCompletionContentPartTextParam
from openai.types.shared_params.response_format_json_schema import JSONSchema

from pagemill.producer.openai.formats import CHAT_URL, COMPLETIONS_URL, STRUCTURES, parse_job, read_job
from pagemill.producer.openai.responses import read_response
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
CHAT: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "x"}]}
PROMPT: dict[str, Any] = {"model": "m", "prompt": "x"}


def job(**fields: Any) -> Job:
    return parse_job(read_job(CHAT_URL, CHAT | fields))


def shape(parsed: Job) -> Any:
    assert parsed.structured_outputs is not None
    return json.loads(parsed.structured_outputs.json or "null")


FORMATS: list[tuple[Mapping[str, Any], Any]] = [
    ({"type": "json_object"}, {"type": "object"}),
    ({"type": "json_object", "schema": None}, {"type": "object"}),
    ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
    ({"type": "json_schema", "json_schema": {"name": "n", "strict": False, "schema": SCHEMA}}, SCHEMA),
]


@pytest.mark.parametrize(("given", "expected"), FORMATS, ids=repr)
def test_a_response_format_holds(given: Mapping[str, Any], expected: Any) -> None:
    assert shape(job(response_format=given)) == expected
    assert shape(Job.parse({**PROMPT, "response_format": given})) == expected


@pytest.mark.parametrize(
    "given",
    [
        {"type": "text", "schema": SCHEMA},
        {"type": "json_object", "json_schema": {"schema": SCHEMA}},
        {"type": "json_object", "schema": "x"},
        {"type": "json_object", "pattern": "x"},
        {"type": "json_schema", "schema": SCHEMA},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA, "regex": "x"}},
        {"type": "json_schema", "json_schema": {"schema": SCHEMA}, "schema": SCHEMA},
        {"type": "regex", "pattern": "x"},
    ],
    ids=repr,
)
def test_a_response_format_with_other_members_is_refused(given: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="response_format"):
        job(response_format=given)


def test_the_members_that_openai_declares() -> None:
    """Walk OpenAI's own types: a member that it adds must be read or rejected on purpose."""
    hints = get_type_hints
    assert hints(JSONSchema).keys() == {"name", "description", "schema", "strict"}
    assert hints(shared_params.ResponseFormatJSONObject).keys() == {"type"}
    assert hints(shared_params.ResponseFormatText).keys() == {"type"}
    values: dict[str, Any] = {"type": "text", "text": "x", "prompt_cache_breakpoint": {"mode": "explicit"}}
    part = {name: values[name] for name in hints(ChatCompletionContentPartTextParam)}
    assert job(messages=[{"role": "user", "content": [part]}]).messages[0].text == "x"  # type: ignore[index]
    declared = hints(ChatCompletionContentPartImageParam).keys()
    assert declared <= {"type", "image_url", "prompt_cache_breakpoint"}


@pytest.mark.parametrize(
    "part",
    [
        {"type": "text", "text": "x", "weight": 2},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA==", "crop": [0]}},
        {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}, "weight": 2},
    ],
    ids=repr,
)
def test_a_part_with_other_members_is_refused_by_name(part: Mapping[str, Any]) -> None:
    with pytest.raises(InvalidJob, match=r"messages\.0\.content\S*\.(weight|crop) is not supported"):
        job(messages=[{"role": "user", "content": [part]}])


VALUES = {"json": SCHEMA, "choice": ["a", "b"], "regex": "a+", "grammar": 'start: "a"'}


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize(("url", "body"), [(CHAT_URL, CHAT), (COMPLETIONS_URL, PROMPT)], ids=["chat", "text"])
def test_other_names_of_structured_outputs(name: str, url: str, body: dict[str, Any]) -> None:
    kind = STRUCTURES[name]
    aliased, plain = (
        parse_job(read_job(url, body | {key: value}))
        for key, value in ((name, VALUES[kind]), ("structured_outputs", {kind: VALUES[kind]}))
    )
    assert aliased.structured_outputs == plain.structured_outputs is not None
    assert read_job(url, body | {name: None}) == read_job(url, body)
    for other in ("structured_outputs", "response_format", *(STRUCTURES.keys() - {name})):
        with pytest.raises(InvalidJob, match="exclude each other"):
            read_job(url, body | {name: VALUES[kind], other: {"type": "json_object"}})


def test_whole_floats_are_integers() -> None:
    given = {
        "max_tokens": 16.0,
        "n": 2.0,
        "seed": 7.0,
        "top_k": 3.0,
        "stop_token_ids": [1.0],
        "temperature": 1.0,
    }
    parsed = job(**given)
    for name, value in given.items():
        found = getattr(parsed, name)
        assert (list(found) if isinstance(found, tuple) else found) == value
    assert type(parsed.max_tokens) is int
    assert job(logprobs=True, top_logprobs=2.0, max_completion_tokens=4.0).logprobs == 2
    for prompt in ([1.0, 2.0], [1, 2.0], [[1, 2.0]]):
        assert read_job(COMPLETIONS_URL, PROMPT | {"prompt": prompt})["prompt_token_ids"] == [1, 2]
    chat = read_response({"model": "m", "input": "x", "max_output_tokens": 5.0, "ignore_eos": True})
    read = parse_job(read_job(CHAT_URL, chat))
    assert (read.max_tokens, read.ignore_eos) == (5, True)
    for wrong in (16.5, 1e300, True):
        with pytest.raises(InvalidJob, match="max_tokens"):
            job(max_tokens=wrong)


@pytest.mark.parametrize(
    "name", ["guided_decoding_backend", "guided_whitespace_pattern", "max_new_tokens", "enable_thinking"]
)
def test_names_of_other_engines_have_a_hint(name: str) -> None:
    with pytest.raises(InvalidJob, match=f"parameter {name} is not supported; (use|leave) "):
        job(**{name: 5})


@pytest.mark.parametrize("wrong", [0, -1, 16.5, 1e300, True, "16", [], {}])
def test_a_wrong_bound_is_reported_under_the_name_it_was_given(wrong: Any) -> None:
    with pytest.raises(InvalidJob, match=r"^max_completion_tokens: ") as error:
        job(max_completion_tokens=wrong)
    assert error.value.param == "max_completion_tokens"
    with pytest.raises(InvalidJob, match=r"^max_output_tokens: ") as error:
        read_response({"model": "m", "input": "x", "max_output_tokens": wrong})
    assert error.value.param == "max_output_tokens"


@pytest.mark.parametrize(
    "given",
    [
        {"text": {"format": {"type": "text", "schema": SCHEMA}}},
        {"text": {"format": {"type": "json_schema", "schema": SCHEMA, "regex": "x"}}},
        {"tool_choice": {"type": "function", "name": "f", "mode": "x"}},
    ],
    ids=repr,
)
def test_objects_of_a_response_have_no_other_members(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob, match="is not supported"):
        read_response({"model": "m", "input": "x"} | given)


@pytest.mark.parametrize("role", ["system", "developer", "user", "assistant", "tool"])
@pytest.mark.parametrize("name", ["alice", "Ärztin 1", None])
def test_a_message_of_any_role_may_have_a_name(role: str, name: str | None) -> None:
    message = {"role": role, "content": "x", "name": name}
    (read,) = job(messages=[message]).messages or ()
    assert read.name == name
    assert read.is_plain
    (own,) = (
        Job.parse(
            {"model": "m", "messages": [{**message, "role": role.replace("developer", "system")}]}
        ).messages
        or ()
    )
    assert own == read
    plain = job(messages=[{"role": role, "content": "x"}])
    assert (plain.messages == (read,)) == (name is None), "a name is part of the work"
    assert ("".join(m.more() for m in plain.messages or ()) == read.more()) == (name is None)


def test_an_invalid_message_is_one_complaint() -> None:
    for wrong in ({"role": "user", "content": "x", "nme": "a"}, {"role": "user", "content": "x", "name": 7}):
        with pytest.raises(InvalidJob) as refused:
            job(messages=[wrong])
        assert "Tuple" not in str(refused.value)
        assert "at least" not in str(refused.value)


@pytest.mark.parametrize(
    ("given", "variables"),
    [
        (
            {"continue_final_message": True, "add_generation_prompt": False},
            {"continue_final_message": True, "add_generation_prompt": False},
        ),
        ({"continue_final_message": True}, {"continue_final_message": True}),
        ({"continue_final_message": None, "add_generation_prompt": True}, None),
        ({"continue_final_message": False}, None),
        (
            {"add_generation_prompt": False, "chat_template_kwargs": {"x": 1}},
            {"x": 1, "add_generation_prompt": False},
        ),
    ],
    ids=repr,
)
def test_how_the_prompt_ends_is_for_the_template(given: dict[str, Any], variables: Any) -> None:
    assert job(**given).chat_template_kwargs == variables


@pytest.mark.parametrize(
    "given",
    [
        {"continue_final_message": True, "add_generation_prompt": True},
        {"continue_final_message": "yes"},
        {"add_generation_prompt": 0},
    ],
    ids=repr,
)
def test_how_the_prompt_ends_is_checked(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob) as caught:
        job(**given)
    assert caught.value.param in given


CALL = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
OUTPUT = {"type": "function_call_output", "call_id": "c", "output": "1"}
ITEMS: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"role": "user", "content": "x"}, ("type", "phase", "status", "id")),
    ({"role": "assistant", "content": "x"}, ("type", "phase", "status", "id")),
    (CALL, ("id", "status", "parsed_arguments")),
    (OUTPUT, ("id", "status", "name")),
    ({"type": "reasoning", "summary": []}, ("id", "status", "encrypted_content", "content")),
    ({"role": "user", "content": [{"type": "input_text", "text": "x"}]}, ()),
    ({"role": "assistant", "content": [{"type": "output_text", "text": "x", "parsed": {}}]}, ()),
]
"""Items of /v1/responses, and members that do not affect the output."""


@pytest.mark.parametrize(("item", "known"), ITEMS, ids=repr)
def test_a_member_of_an_item_is_used_or_refused_by_name(item: dict[str, Any], known: tuple[str, ...]) -> None:
    values = {"type": "message", "content": []}
    earlier = [{"role": "user", "content": "x"}, CALL] if item is OUTPUT else []
    for name in known:
        read_response({"model": "m", "input": [*earlier, item | {name: values.get(name, "x")}]})
    spoiled = [item | {"unknown": 1}]
    if isinstance(item.get("content"), list):
        spoiled.append(item | {"content": [item["content"][0] | {"unknown": 1}]})
    for one in spoiled:
        with pytest.raises(InvalidJob, match="unknown is not supported"):
            read_response({"model": "m", "input": [*earlier, one]})
    read_response({"model": "m", "input": [*earlier, item | {"unknown": None}]})


def test_negative_seeds_are_seeds_and_minus_one_is_random() -> None:
    assert "seed" not in read_job(CHAT_URL, CHAT | {"seed": -1})
    seeds = {job(seed=seed).seed for seed in (-2, -3, 1 - 2**63, 0, 5)}
    assert len(seeds) == 5
    for wrong in (-(2**63) - 1, 2**63, -1.5, "-1"):
        with pytest.raises(InvalidJob, match="seed"):
            job(seed=wrong)


def test_what_clients_send_without_an_effect_is_accepted() -> None:
    given: dict[str, Any] = {
        "logprobs": False, "top_logprobs": 0, "prompt_cache_retention": "24h", "verbosity": "medium",
    }  # fmt: skip
    assert job(**given) == job()
    with pytest.raises(InvalidJob, match="top_logprobs needs logprobs"):
        job(top_logprobs=2)
    with pytest.raises(InvalidJob, match="this value of verbosity"):
        job(verbosity="low")


def test_a_refusal_in_the_history_is_what_the_assistant_answered() -> None:
    part = {"type": "refusal", "refusal": "No."}
    for answer in (
        {"content": None, "refusal": "No."},
        {"content": [part]},
        {"content": "No.", "refusal": None},
    ):
        parsed = job(messages=[*CHAT["messages"], {"role": "assistant", **answer}, *CHAT["messages"]])
        assert parsed.messages is not None
        assert parsed.messages[1].content == "No."


def test_values_that_mean_what_another_one_does() -> None:
    assert job(top_p=0) == job(top_p=1, top_k=1)
    assert job(top_p=0.0) == job(top_p=1, top_k=1)
    assert job(reasoning_effort="max").reasoning_effort == "xhigh"
    hints = {"prompt_cache_options": {"mode": "implicit"}, "client_metadata": {"x-codex-turn": "1"}}
    assert job(**hints) == job()
    asked = {"model": "m", "input": "x"}
    for reasoning in (
        {"effort": "max", "summary": "detailed"},
        {"effort": "max", "generate_summary": "concise"},
    ):
        assert read_response(asked | hints | {"reasoning": reasoning})["reasoning_effort"] == "max"
    with pytest.raises(InvalidJob, match="reasoning"):
        read_response(asked | {"reasoning": {"summary": "long"}})


def test_nulls_in_tools_and_calls_are_as_if_omitted() -> None:
    function = {"name": "f", "parameters": {"type": "object"}}
    tool = {"type": "function", "function": function}
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    choice = {"type": "function", "function": {"name": "f"}}
    plain = {"role": "assistant", "content": None, "tool_calls": [call]}
    nulls = {
        "tools": [tool | {"custom": None, "function": function | {"description": None, "strict": None}}],
        "tool_choice": choice | {"allowed_tools": None},
        "messages": [
            plain
            | {"tool_calls": [call | {"custom": None, "function": call["function"] | {"description": None}}]}
        ],
    }
    assert job(**nulls) == job(tools=[tool], tool_choice=choice, messages=[plain])
    for wrong in ({"tools": [{"type": "custom", "custom": {}}]}, {"tool_choice": {"type": "allowed_tools"}}):
        with pytest.raises(InvalidJob, match="only functions are supported") as refused:
            job(**{"tools": [tool]} | wrong)
        assert refused.value.code == "unsupported_feature"


def test_members_of_answers_are_accepted_in_the_history() -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    sent = {
        "role": "assistant", "content": "{}", "id": "m", "annotations": [{"type": "url_citation"}], "weight": 1,
        "refusal": None, "audio": None, "function_call": None, "parsed": {}, "thinking_blocks": [{}],
        "provider_specific_fields": {"reasoning": "x"}, "reasoning_details": [{}], "tool_calls": [
            call | {"index": 0, "extra_content": {}, "function": call["function"] | {"parsed_arguments": {}}}
        ],
    }  # fmt: skip
    plain = {"role": "assistant", "content": "{}", "tool_calls": [call]}
    assert job(messages=[sent]) == job(messages=[plain])
    for wrong in ({"role": "user", "parsed": {}}, {"role": "assistant", "audio": {"id": "a"}}):
        with pytest.raises(InvalidJob, match=r"(parsed|audio): no such field"):
            job(messages=[{"content": "x"} | wrong])


def test_a_refusal_in_an_earlier_response_is_text() -> None:
    part = {"type": "refusal", "refusal": "No."}
    items = [
        {"role": "user", "content": "x"},
        {"type": "message", "role": "assistant", "id": "m", "status": "completed", "content": [part]},
        {"role": "user", "content": "y"},
    ]
    options = {"include_obfuscation": False}
    chat = read_response({"model": "m", "input": items, "stream_options": options})
    assert [message["content"] for message in chat["messages"]] == ["x", "No.", "y"]
    with pytest.raises(InvalidJob, match=r"input\.1\.content"):
        read_response({"model": "m", "input": [items[0], items[1] | {"content": [{"type": "refusal"}]}]})


@pytest.mark.parametrize(
    "given",
    [
        {"response_format": {"type": "xml"}},
        {"response_format": {"type": "json_object"}, "structured_outputs": {"regex": "a"}},
    ],
    ids=str,
)
def test_an_error_of_several_fields_names_one(given: dict[str, Any]) -> None:
    with pytest.raises(InvalidJob) as error:
        job(**given)
    assert error.value.param == "response_format"


def test_messages_speak_of_lists_and_objects() -> None:
    with pytest.raises(InvalidJob, match="messages: List should have at least 1 item"):
        job(messages=[])
    with pytest.raises(InvalidJob, match="logit_bias: Input should be a valid object"):
        job(logit_bias=[])
