"""Parsing of reasoning and tool calls: the syntax of each family, in any chunks, and arbitrary text."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.chat.families import TOOLS, detect_tools, unsupported_family
from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.chat.thinking import THINKING, detect_thinking
from pagemill.producer.wire.chat.parser import parse_whole
from pagemill.producer.wire.chat.pieces import Call
from tests.producer.wire.chat.chunks import read

CITY = '{"city": "Köln }] \\" </tool_call>", "days": [1, {"a": null}]}'
TIME = "{}"


JSON_TOOLS = [name for name, syntax in TOOLS.items() if syntax.elements is None and not syntax.quote]
"""Syntaxes whose arguments are JSON; `test_elements.py` has the others."""


def forced(name: str, *calls: tuple[str, str]) -> str:
    """The calls as the grammar writes them."""
    form = TOOLS[name].form
    written = [form.head(function) + arguments + form.after for function, arguments in calls]
    return form.begin + form.separator.join(written) + form.end


@pytest.mark.parametrize("name", JSON_TOOLS)
def test_what_a_family_writes_is_read(name: str) -> None:
    syntax = ChatSyntax(tools=name)
    one = parse_whole(syntax, forced(name, ("weather", CITY)))
    assert (one.content, one.calls) == ("", [Call("weather", CITY)])
    two = parse_whole(syntax, forced(name, ("weather", CITY), ("time", TIME)))
    assert (two.content, two.calls) == ("", [Call("weather", CITY), Call("time", TIME)])


@pytest.mark.parametrize("name", JSON_TOOLS)
def test_a_mark_that_is_cut_off_after_a_call_is_not_content(name: str) -> None:
    text = forced(name, ("weather", CITY))
    for cut in range(len(text)):
        answer = read(ChatSyntax(tools=name), text[:cut])
        assert not answer.calls or answer.content == "", text[:cut]


@pytest.mark.parametrize("name", [name for name in JSON_TOOLS if TOOLS[name].opens])
def test_words_around_calls_are_content(name: str) -> None:
    text = f"Let me look.\n\n{forced(name, ('weather', CITY))}\nThat was it."
    answer = parse_whole(ChatSyntax(tools=name), text)
    assert (answer.content, answer.calls) == ("Let me look.\nThat was it.", [Call("weather", CITY)])


@pytest.mark.parametrize(
    ("name", "text", "calls"),
    [
        ("hermes", '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', [Call("f", '{"a": 1}')]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": "{\\"a\\": 1}"}\n', [Call("f", '{"a": 1}')]),
        ("hermes", '<tool_call>\n{"name": "f", "arguments": {"a": 1, "b', [Call("f", '{"a": 1, "b')]),
        ("llama3_json", '<|python_tag|>{"name": "f", "parameters": {}}', [Call("f", "{}")]),
        ("llama3_json", '{"type": "function", "name": "f", "parameters": {}}', [Call("f", "{}")]),
        ("json", '```json\n[{"name": "f", "arguments": {}}]\n```', [Call("f", "{}")]),
        (
            "json",
            '{"function": {"name": "f", "arguments": null}, "type": "function"}',
            [Call("f", "{}")],
        ),
        ("mistral_args", '[TOOL_CALLS]f[CALL_ID]a1[ARGS]{"a": 1}', [Call("f", '{"a": 1}')]),
        ("phi4", 'functools[{"name": "f", "arguments": {}}]', [Call("f", "{}")]),
    ],
)
def test_other_ways_to_write_a_call(name: str, text: str, calls: list[Call]) -> None:
    answer = parse_whole(ChatSyntax(tools=name), text)
    assert (answer.content, answer.calls) == ("", calls)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("hermes", "<tool_call>\nweather in Köln\n</tool_call>"),
        ("hermes", '<tool_call>\n{"name": 5, "arguments": {}}\n</tool_call>'),
        ("hermes", '<tool_call>\n{"name": "f", '),
        ("hermes", "<tool_ca"),
        ("hermes", "a < b <tool> and so on  "),
        ("json", '{"answer": 42}'),
        ("json", "[1, 2, 3]"),
        ("json", " Sure: "),
        ("json", '{"name": "f"}'),
        ("mistral", "[TOOL_CALLS]"),
        ("mistral_args", "[TOOL_CALLS] " + "x" * 600),
        ("deepseek_v3", "<｜tool▁calls▁begin｜>"),  # noqa: RUF001
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    answer = parse_whole(ChatSyntax(tools=name), text)
    assert (answer.content, answer.calls) == (text, [])


@pytest.mark.parametrize(
    ("is_open", "text", "reasoning", "content"),
    [
        (False, "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        (True, "\nHm.\n</think>\n\nYes.\n", "Hm.", "Yes.\n"),
        (True, "Hm, and no end", "Hm, and no end", ""),
        (False, "Yes. <think>no</think>", "", "Yes. <think>no</think>"),
        (False, "<think>\n\n</think>\n\nYes.", "", "Yes."),
        (False, " <thin", "", " <thin"),
        (True, "a </think", "a </think", ""),
        (True, "a < b </thing> c</think>", "a < b </thing> c", ""),
    ],
)
def test_thinking_is_apart(is_open: bool, text: str, reasoning: str, content: str) -> None:
    answer = parse_whole(ChatSyntax("think", is_open), text)
    assert (answer.reasoning, answer.content) == (reasoning, content)


def test_a_call_follows_the_thinking() -> None:
    text = f"<think>\nI call.\n</think>\n\n{forced('hermes', ('weather', CITY))}"
    answer = parse_whole(ChatSyntax("think", tools="hermes"), text)
    assert (answer.reasoning, answer.content) == ("I call.", "")
    assert answer.calls == [Call("weather", CITY)]
    assert json.loads(answer.calls[0].arguments)


_WORDS = st.sampled_from(
    [mark for family in TOOLS.values() for mark in (*family.opens, *family.skipped)]
    + [tag for tags in THINKING.values() for tag in (tags.opening, tags.closing)]
    + [
        '{"name": "f", "arguments": ', '{"name": "', "{", "}", '"', "\\", "[", "]", ", ", " ", "\n",
        "f[ARGS]", "x" * 300,
    ]
    + [forced(name, ("weather", CITY)) for name in JSON_TOOLS]
)  # fmt: skip
_TEXTS = st.lists(_WORDS | st.text(max_size=6), max_size=12).map("".join)
_SYNTAXES = st.builds(
    ChatSyntax,
    st.sampled_from([None, *THINKING]),
    st.booleans(),
    st.sampled_from([None, *TOOLS]),
)


@given(_SYNTAXES, _TEXTS, st.lists(st.integers(0, 10_000), max_size=30))
def test_chunks_do_not_matter(syntax: ChatSyntax, text: str, cuts: list[int]) -> None:
    read(syntax, text, cuts)


@given(_SYNTAXES)
def test_a_syntax_is_written_and_read(syntax: ChatSyntax) -> None:
    assert ChatSyntax.read(str(syntax)) == syntax
    assert ChatSyntax.read("later/unheard") == ChatSyntax()


@pytest.mark.parametrize(
    ("template", "tools", "thinking"),
    [
        ("{% if tools %}<tool_call>{% endif %}{{ '<think>' }}...</think>", "hermes", "think"),
        ("{% if tools %}[TOOL_CALLS]{% endif %}", "mistral", None),
        ("{% if tools %}[TOOL_CALLS] [ARGS] [THINK] [/THINK]{% endif %}", "mistral_args", "magistral"),
        ('{% if tools %}{"name": x, "parameters": y}<|eot_id|>{% endif %}', "llama3_json", None),
        ("{% if tools %}<|tool_call|>{% endif %}", "granite", None),
        ("{{ messages }}", "json", None),
        ("<|start|>{{ tools }}<|channel|>analysis<|message|>...<|end|>", "harmony", "harmony"),
        ("{% if tools %}<|tool_call|>{% endif %}<|end|>", "granite", None),
        ("{{ tools }}<tool_call>\n<function=x>", "qwen3_coder", None),
        ("{{ tools }}<seed:tool_call><function=x></seed:think>", "seed_oss", "seed_oss"),
        ("{{ tools }}<tool_call>{x}\n<arg_key></think>", "glm45", "think"),
        ("{{ tools }}'<minimax:tool_call>'<invoke name=", "minimax_m2", None),
        ('{{ tools }}set token = "｜DSML｜"', "deepseek_v32", None),  # noqa: RUF001
        ("{{ tools }}<|tool_calls_section_begin|><|tool_call_begin|>", "kimi_k2", None),
        ("{{ tools }}<|tool_call>call:<tool_call|><channel|>", "gemma4", "gemma4"),
        ("{{ tools }}<|python_start|>", None, None),
    ],
)
def test_a_template_tells_the_family(template: str, tools: str | None, thinking: str | None) -> None:
    assert (detect_tools(template), detect_thinking(template)) == (tools, thinking)
    assert (unsupported_family(template) is None) == (tools is not None)


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ('{"arguments": {"a": "\\ud83d"}, "name": "f"}', ("f", r'{"a": "\ud83d"}')),
        ('{"arguments": "{\\"a\\": \\"\\ud83d\\"}", "name": "f"}', ("f", r'{"a": "\ud83d"}')),
        ('{"arguments": {"a": "\\ud83d\\ude00"}, "name": "f"}', ("f", '{"a": "😀"}')),
        ('{"arguments": {}, "name": "\\ud83d"}', None),
        ('{"arguments": {"a": 1e999}, "name": "f"}', None),
        ('{"arguments": {}, "name": "' + 129 * "f" + '"}', None),
        ('{"arguments": {}, "name": "' + 128 * "f" + '"}', (128 * "f", "{}")),
    ],
)
def test_a_call_is_always_storable(body: str, expected: tuple[str, str] | None) -> None:
    text = f"<tool_call>{body}</tool_call>"
    answer = parse_whole(ChatSyntax(tools="hermes"), text)
    calls = [(call.name, call.arguments) for call in answer.calls]
    assert calls == ([] if expected is None else [expected])
    if expected is None:
        assert body in answer.content
    else:
        json.loads(calls[0][1])
        calls[0][1].encode()
