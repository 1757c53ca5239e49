"""Parsing gpt-oss' harmony: the same result as openai-harmony, in any chunks, and for arbitrary text."""

from __future__ import annotations

import gzip
import importlib.util
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.producer.wire.chat.parser import parse_whole
from pagemill.producer.wire.chat.pieces import Answer, Call
from tests.producer.wire.chat.chunks import in_chunks, read

WITH_TOOLS = ChatSyntax("harmony", tools="harmony")
ANALYSIS = "<|channel|>analysis<|message|>"
FINAL = "<|channel|>final<|message|>"
NEXT = "<|end|><|start|>assistant"
CALL = '<|channel|>commentary to=functions.weather <|constrain|>json<|message|>{"city": "Köln"}<|call|>'
WEATHER = Call("weather", '{"city": "Köln"}')


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        (f"{ANALYSIS}Hm.{NEXT}{FINAL}Yes.<|return|>", Answer("Hm.", "Yes.")),
        (f"{FINAL}Yes.", Answer("", "Yes.")),
        (f"{ANALYSIS}Hm.{NEXT}{CALL}", Answer("Hm.", "", [WEATHER])),
        (f"{ANALYSIS}a{NEXT}{ANALYSIS}b{NEXT}{FINAL}c", Answer("a\nb", "c")),
        (
            f"{ANALYSIS}a{NEXT}<|channel|>commentary<|message|>I look.{NEXT}{CALL}",
            Answer("a", "I look.", [WEATHER]),
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{}<|call|>", Answer("", "", [Call("f", "{}")])),
        (
            "<|channel|>commentary to=functions.f<|constrain|>json<|message|>{",
            Answer("", "", [Call("f", "{")]),
        ),
        ("<|channel|>analysis to=python code<|message|>1+1<|call|>", Answer("", "", [Call("python", "1+1")])),
        ("<|channel|>final <|constrain|>json<|message|>{}", Answer("", "{}")),
        (f"{CALL}<|start|>assistant{CALL}", Answer("", "", [WEATHER, WEATHER])),
        (f"{ANALYSIS}  a b \n{NEXT}{FINAL}  c\n", Answer("  a b \n", "  c\n")),
        (f"{ANALYSIS}cut off", Answer("cut off", "")),
        (f"{ANALYSIS}a{NEXT}<|channel|>fin", Answer("a", "")),
        (f"{ANALYSIS}a{NEXT}<|channel|>commentary to=functions.wea", Answer("a", "")),
    ],
)
def test_what_gpt_oss_writes(text: str, answer: Answer) -> None:
    assert parse_whole(WITH_TOOLS, text) == answer
    for cut in range(len(text)):
        assert in_chunks(WITH_TOOLS, text, [cut]) == answer


@pytest.mark.parametrize(
    ("text", "content"),
    [
        ("Hello.", "Hello."),
        ("Hello <|channel|>final<|message|>you", "Hello <|channel|>final<|message|>you"),
        ("to=you", "to=you"),
        ("<|channel|>verdict<|message|>guilty", "guilty"),
        ("<|message|>x<|return|>", "x"),
        ("<|start|>assistant<|end|>x", "<|start|>assistant\nx"),
        (f"{FINAL}x<|end|>y", "x\ny"),
        ("<|channel|>final hello there", "<|channel|>final hello there"),
        ("<|channel|>" + "x" * 600, "<|channel|>" + "x" * 600),
        (f"<|channel|>commentary to=functions.{'x' * 200}<|message|>y", "y"),
    ],
)
def test_what_is_malformed_is_content(text: str, content: str) -> None:
    assert read(WITH_TOOLS, text) == Answer("", content)


def test_without_tools_there_are_no_calls() -> None:
    assert parse_whole(ChatSyntax("harmony"), CALL) == Answer("", WEATHER.arguments)
    text = "<|channel|>analysis to=python code<|message|>1+1<|call|>"
    assert parse_whole(ChatSyntax("harmony"), text) == Answer("1+1", "")


def test_the_prompt_may_open_the_reasoning() -> None:
    text = f"Hm.{NEXT}{FINAL}Yes."
    assert parse_whole(ChatSyntax("harmony", is_open=True), text) == Answer("Hm.", "Yes.")


_HEADERS = st.builds(
    "".join,
    st.tuples(
        st.sampled_from(["", "<|start|>assistant", "<|start|>"]),
        st.sampled_from(["", " to=functions.f", " to=functions.weather"]),
        st.sampled_from([ANALYSIS[:-11], FINAL[:-11], "<|channel|>commentary", "<|channel|>", ""]),
        st.sampled_from(["", " to=functions.f", " to=python", " to=assistant"]),
        st.sampled_from(["", " <|constrain|>json", " json", "<|constrain|>json"]),
        st.sampled_from(["<|message|>", "<|message|>", "<|message|>", ""]),
    ),
)
_WORDS = st.sampled_from(
    ["<|end|>", "<|call|>", "<|return|>", "<|", "<", " ", "\n", "x" * 300, '{"a": 1}', "to="]
)
_TEXTS = st.lists(_HEADERS | _WORDS | st.text(max_size=6), max_size=12).map("".join)


@given(_TEXTS, st.booleans(), st.booleans(), st.lists(st.integers(0, 10_000), max_size=30))
def test_chunks_do_not_matter(text: str, is_open: bool, has_tools: bool, cuts: list[int]) -> None:
    read(ChatSyntax("harmony", is_open, "harmony" if has_tools else None), text, cuts)


@pytest.fixture(scope="module")
def encoding(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """openai-harmony, with the vocabulary that it would otherwise download."""
    vocabularies = importlib.util.find_spec("bpe_openai")
    if importlib.util.find_spec("openai_harmony") is None or vocabularies is None or not vocabularies.origin:
        pytest.skip("openai-harmony and bpe-openai are not installed")
    directory: Path = tmp_path_factory.mktemp("vocabulary")
    packed = (Path(vocabularies.origin).parent / "data" / "o200k_base.tiktoken.gz").read_bytes()
    (directory / "o200k_base.tiktoken").write_bytes(gzip.decompress(packed))
    os.environ["TIKTOKEN_ENCODINGS_BASE"] = str(directory)
    try:
        from openai_harmony import HarmonyEncodingName, load_harmony_encoding

        return load_harmony_encoding(HarmonyEncodingName.HARMONY_GPT_OSS)
    finally:
        del os.environ["TIKTOKEN_ENCODINGS_BASE"]


def read_by_openai(encoding: Any, text: str) -> Answer:
    """Combine the messages of openai-harmony's own parser by the rules of its guide."""
    from openai_harmony import Role

    parts: dict[str, list[str]] = {"analysis": [], "content": []}
    calls = []
    ids = encoding.encode(text, allowed_special="all")
    for message in encoding.parse_messages_from_completion_tokens(ids, Role.ASSISTANT):
        (content,) = message.content
        if message.recipient is not None and message.channel != "final":
            calls.append(Call(message.recipient.removeprefix("functions."), content.text))
        elif content.text:
            parts["analysis" if message.channel == "analysis" else "content"].append(content.text)
    return Answer("\n".join(parts["analysis"]), "\n".join(parts["content"]), calls)


_BODIES = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="<|>"), min_size=1, max_size=20)
_MESSAGES = st.one_of(
    st.tuples(st.just(ANALYSIS), _BODIES, st.just("<|end|>")),
    st.tuples(st.just(FINAL), _BODIES, st.sampled_from(["<|end|>", "<|return|>"])),
    st.tuples(st.just("<|channel|>commentary<|message|>"), _BODIES, st.just("<|end|>")),
    st.tuples(
        st.sampled_from(
            [
                "<|channel|>commentary to=functions.weather <|constrain|>json<|message|>",
                "<|channel|>commentary to=functions.weather<|constrain|>json<|message|>",
                " to=functions.f-1<|channel|>commentary json<|message|>",
                " to=functions.a.b<|channel|>commentary <|constrain|>json<|message|>",
                "<|channel|>analysis to=browser.search code<|message|>",
            ]
        ),
        st.sampled_from(['{"city": "Köln"}', "{}", '{"a": "<b>|"}']),
        st.just("<|call|>"),
    ),
).map("".join)
_CONVERSATIONS = st.lists(_MESSAGES, min_size=1, max_size=6).map("<|start|>assistant".join)


def test_the_same_is_read_as_by_openai(encoding: Any) -> None:
    @given(_CONVERSATIONS, st.lists(st.integers(0, 10_000), max_size=30))
    def check(text: str, cuts: list[int]) -> None:
        assert in_chunks(WITH_TOOLS, text, cuts) == read_by_openai(encoding, text)

    check()
