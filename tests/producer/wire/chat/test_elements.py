"""Calls whose arguments are not JSON: the output of the models' templates is parsed back, in any chunks."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.chat.families import TOOLS
from pagemill.common.chat.syntax import ChatSyntax
from pagemill.producer.wire.chat.parser import parse_whole
from pagemill.producer.wire.chat.pieces import Answer
from tests.producer.wire.chat.chunks import in_chunks, read

ELEMENTS = [name for name, syntax in TOOLS.items() if syntax.elements is not None]
GEMMA = "gemma4"
ARGUMENTS: dict[str, Any] = {
    "city": "Köln\n\"}]<b>\\ & 'x'",
    "days": 3,
    "zip": "50667",
    "deep": {"a": [1.5, None, {"b": "c"}], "d": {}},
    "tags": ["x", "{", ""],
    "is_sunny": True,
    "note": "",
}


def syntax_of(name: str, arguments: Mapping[str, Any]) -> ChatSyntax:
    values = tuple(key for key, value in arguments.items() if not isinstance(value, str))
    return ChatSyntax(tools=name, values=(("weather", values),))


def bare(value: Any) -> str:
    """A value as Gemma's template writes it."""
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{bare(one)}" for key, one in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(bare, value)) + "]"
    return json.dumps(value)


def written(name: str, *calls: tuple[str, Mapping[str, Any]]) -> str:
    """Calls as the model's template writes them."""
    syntax, texts = TOOLS[name], []
    for function, arguments in calls:
        text = ""
        if syntax.elements is None:
            text = bare(dict(arguments))
        else:
            for key, value in arguments.items():
                is_text = isinstance(value, str)
                before = syntax.elements.before.replace("KEY", key).replace("TEXT", str(is_text).lower())
                text += before + (value if is_text else json.dumps(value)) + syntax.elements.after
        texts.append(syntax.form.head(function) + text + syntax.form.after)
    return syntax.form.begin + syntax.form.separator.join(texts) + syntax.form.end


def calls_of(answer: Answer) -> list[tuple[str, Any]]:
    return [(call.name, json.loads(call.arguments)) for call in answer.calls]


@pytest.mark.parametrize("name", [*ELEMENTS, GEMMA])
def test_what_a_template_writes_is_read_back(name: str) -> None:
    calls = [("weather", ARGUMENTS), ("time", {}), ("weather", {"city": "Rom"})]
    text = written(name, *calls)
    syntax = syntax_of(name, ARGUMENTS)
    whole = read(syntax, text)
    assert (whole.content, calls_of(whole)) == ("", calls)
    for cut in range(len(text)):
        assert in_chunks(syntax, text, [cut]) == whole


@pytest.mark.parametrize("name", [*ELEMENTS, GEMMA])
def test_words_around_calls_are_content(name: str) -> None:
    text = f"Let me look.\n\n{written(name, ('weather', ARGUMENTS))}\nThat was it."
    answer = parse_whole(syntax_of(name, ARGUMENTS), text)
    assert (answer.content, calls_of(answer)) == ("Let me look.\nThat was it.", [("weather", ARGUMENTS)])


_JSON: Any = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text("ab{ }[],:"),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text("abc", min_size=1), inner, max_size=3)
    ),
    max_leaves=6,
)
_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), max_size=30)
_ARGUMENTS = st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), _TEXT | _JSON, max_size=4)


@pytest.mark.parametrize("name", [*ELEMENTS, GEMMA])
@given(arguments=_ARGUMENTS, cuts=st.lists(st.integers(0, 10_000), max_size=20))
def test_any_arguments_are_read_back(name: str, arguments: dict[str, Any], cuts: list[int]) -> None:
    text = written(name, ("weather", arguments))
    answer = in_chunks(syntax_of(name, arguments), text, cuts)
    assert (answer.content, calls_of(answer)) == ("", [("weather", arguments)])


@pytest.mark.parametrize(
    ("name", "text", "arguments"),
    [
        ("qwen3_coder", "<function=f>\n<parameter=a>\n\n x \n\n</parameter>\n</function>", {"a": "\n x \n"}),
        ("qwen3_coder", "<function=f><parameter=a>x</parameter></tool_call>", {"a": "x"}),
        ("qwen3_coder", "<tool_call><function=f></function></tool_call>", {}),
        ("seed_oss", "<function=f><parameter=n>True</parameter></function>", {"n": True}),
        ("seed_oss", "<function=f><parameter=n>None</parameter></function>", {"n": None}),
        ("seed_oss", "<function=f><parameter=n>many</parameter></function>", {"n": "many"}),
        (
            "seed_oss",
            "<function=f><parameter=n>{'a': [1, None]}</parameter></function>",
            {"n": {"a": [1, None]}},
        ),
        ("seed_oss", "<function=f><parameter=n>{1, 2}</parameter></function>", {"n": "{1, 2}"}),
        (
            "seed_oss",
            f"<function=f><parameter=n>{['a'] * 999}</parameter></function>",
            {"n": str(["a"] * 999)},
        ),
        ("seed_oss", f"<function=f><parameter=n>{'[' * 999}</parameter></function>", {"n": "[" * 999}),
        ("minimax_m2", '<invoke name="f"><parameter name="n">1e999</parameter></invoke>', {"n": "1e999"}),
        ("glm45", "<tool_call>f<arg_key>n</arg_key><arg_value>1</arg_value></tool_call>", {"n": 1}),
        ("glm45", "<tool_call>f</tool_call>", {}),
        ("gemma4", "<|tool_call>call:f{n:1, s : x y,}", {"n": 1, "s": "x y"}),
        (
            "gemma4",
            '<|tool_call>call:f{<|"|>n<|"|>:[{<|"|>a<|"|>:<|"|>}<|"|>}]}<tool_call|>',
            {"n": [{"a": "}"}]},
        ),
    ],
)
def test_other_ways_to_write_a_call(name: str, text: str, arguments: dict[str, Any]) -> None:
    syntax = ChatSyntax(tools=name, values=(("f", ("n",)),))
    answer = read(syntax, text)
    assert (answer.content, calls_of(answer)) == ("", [("f", arguments)])


def test_a_type_that_the_model_states_counts() -> None:
    dsml = "｜DSML｜"  # noqa: RUF001
    parameters = "".join(
        f'<{dsml}parameter name="{key}" string="{is_text}">{value}</{dsml}parameter>'
        for key, is_text, value in (("a", "true", "1"), ("b", "false", "[2]"))
    )
    text = (
        f'<{dsml}function_calls>\n<{dsml}invoke name="f">{parameters}</{dsml}invoke></{dsml}function_calls>'
    )
    assert calls_of(parse_whole(ChatSyntax(tools="deepseek_v32"), text)) == [("f", {"a": "1", "b": [2]})]


@pytest.mark.parametrize("name", [*ELEMENTS, GEMMA])
def test_a_call_that_is_cut_off_keeps_what_came(name: str) -> None:
    text = written(name, ("weather", ARGUMENTS))
    whole = parse_whole(syntax_of(name, ARGUMENTS), text).calls[0].arguments
    for cut in range(len(text)):
        answer = parse_whole(syntax_of(name, ARGUMENTS), text[:cut])
        for call in answer.calls:
            assert whole.startswith(call.arguments)
        assert answer.calls or answer.content.strip() == text[:cut].strip()
        assert not answer.calls or answer.content == "", text[:cut]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("qwen3_coder", "Use <tool_call> to call, or <function= as in the manual."),
        ("qwen3_coder", "<tool_call>\n{}\n</tool_call>"),
        ("qwen3_coder", "<tool_call>" + "x" * 600),
        ("glm45", "<tool_call>a name of many words\n</tool_call>"),
        ("minimax_m2", "<invoke name=f>"),
        ("gemma4", "<|tool_call>call:f"),
        ("gemma4", "<|tool_call>weather in Rome<tool_call|>"),
    ],
)
def test_what_is_no_call_is_content(name: str, text: str) -> None:
    answer = read(ChatSyntax(tools=name), text)
    assert (answer.content, answer.calls) == (text, [])


def test_what_is_malformed_within_a_call_ends_it() -> None:
    text = f"<function=f><parameter=a>1</parameter>{'x' * 600}"
    answer = parse_whole(ChatSyntax(tools="qwen3_coder"), text)
    assert (calls_of(answer), answer.content) == ([("f", {"a": "1"})], "x" * 600)
    deep = f"<|tool_call>call:f{{a:{'[' * 100}{']' * 100}}}<tool_call|>"
    (call,) = parse_whole(ChatSyntax(tools=GEMMA), deep).calls
    assert call.arguments == deep[len("<|tool_call>call:f") : -len("<tool_call|>")]


_MARKS = [
    mark
    for name in (*ELEMENTS, GEMMA)
    for syntax in (TOOLS[name],)
    for mark in (
        *syntax.opens, *syntax.skipped, syntax.form.head("f"), syntax.form.after,
        *((syntax.elements.before.replace("KEY", "n"), syntax.elements.end) if syntax.elements else ('<|"|>',)),
    )
]  # fmt: skip
_WORDS = st.sampled_from([*_MARKS, "{", "}", "[", ":", ",", "\n", " ", "1", "x" * 300])


@given(
    st.sampled_from([*ELEMENTS, GEMMA]),
    st.lists(_WORDS | st.text(max_size=6), max_size=12).map("".join),
    st.lists(st.integers(0, 10_000), max_size=30),
)
def test_chunks_do_not_matter(name: str, text: str, cuts: list[int]) -> None:
    read(ChatSyntax(tools=name, values=(("f", ("n",)),)), text, cuts)


def test_the_parameters_that_are_no_texts_are_recorded() -> None:
    syntax = ChatSyntax("think", tools="qwen3_coder", values=(("f", ("a/b", "c")), ("g", ())))
    assert str(syntax) == 'think/qwen3_coder/{"f":["a/b","c"],"g":[]}'
    assert ChatSyntax.read(str(syntax)) == syntax
    for broken in ("[", "[1]", '{"f":1}', "3", "null"):
        assert ChatSyntax.read(f"/qwen3_coder/{broken}") == ChatSyntax(tools="qwen3_coder")
