"""`regex`, `json` and `grammar`: matchers over an alphabet of bytes."""

from __future__ import annotations

import json
import random
import re

import pytest

from pagemill.engine.errors import (
    InvalidRequest,
)
from pagemill.engine.structured_output.matcher import CompiledSchema, MatcherGrammar, compile_schema
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import ByteTokenizer

EOS = 256
VOCABULARY = GrammarVocabulary.from_tokenizer(ByteTokenizer(), 264, (EOS,))
assert VOCABULARY is not None
TOKENIZER = VOCABULARY.build()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}


def schema(kind: str, text: str) -> CompiledSchema:
    return compile_schema(TOKENIZER, kind, text)


def allowed(grammar: MatcherGrammar) -> set[int]:
    mask = grammar.token_mask()
    return {token for token in range(VOCABULARY.vocab_size) if mask[token >> 3] >> (token & 7) & 1}


def letters(grammar: MatcherGrammar) -> str:
    return "".join(chr(token) for token in sorted(allowed(grammar)) if token < 256)


def write(grammar: MatcherGrammar, rng: random.Random, limit: int = 400) -> list[int]:
    """Draw until the grammar is complete, EOS where it wins."""
    tokens: list[int] = []
    while not grammar.is_complete and len(tokens) < limit:
        token = rng.choice(sorted(allowed(grammar)))
        tokens += [token, *grammar.advance(token)]
        assert grammar.failure is None
    return tokens


def text_of(tokens: list[int]) -> str:
    return bytes(token for token in tokens if token < 256).decode(errors="replace")


@pytest.mark.parametrize(
    ("kind", "text", "pattern"),
    [
        ("regex", r"[a-c]{2}-\d{3}", r"[a-c]{2}-\d{3}"),
        ("regex", "^(yes|no|maybe so)$", "yes|no|maybe so"),
        ("regex", "a*b?", "a*b?"),
        ("grammar", 'start: "x" num+\nnum: /[0-9]/ ","', r"x([0-9],)+"),
        ("grammar", 'root ::= "<" item* ">"\nitem ::= [ab] "."', r"<([ab]\.)*>"),
    ],
)
def test_whatever_is_drawn_matches(kind: str, text: str, pattern: str) -> None:
    compiled, rng = schema(kind, text), random.Random(1)
    for _ in range(20):
        assert re.fullmatch(pattern, text_of(write(compiled.start(), rng)))


def test_what_json_is_drawn_is_what_the_schema_says() -> None:
    compiled, rng = schema("json", json.dumps(PERSON)), random.Random(2)
    for _ in range(20):
        tokens = write(compiled.start(), rng)
        assert tokens[-1] != EOS, "the closing brace ends it"
        value = json.loads(text_of(tokens))
        assert list(value) == ["name", "age"]
        assert type(value["age"]) is int
        assert len(value["name"]) <= 4


def test_what_is_certain_is_forced() -> None:
    grammar = schema("json", json.dumps(PERSON)).start()
    assert letters(grammar) == "{"
    assert bytes(grammar.advance(ord("{"))) == b'"name": "'
    assert grammar.advance(ord("B")) == []
    assert bytes(grammar.advance(ord('"'))) == b', "age": '
    assert grammar.advance(ord("7")) == []
    assert letters(grammar) == "0123456789}"
    assert grammar.advance(ord("}")) == []
    assert grammar.is_complete


def test_the_end_of_a_text_needs_no_eos_where_nothing_may_follow() -> None:
    open_ended = schema("regex", "a+").start()
    open_ended.advance(ord("a"))
    assert not open_ended.is_complete
    assert allowed(open_ended) == {ord("a"), EOS}
    assert open_ended.advance(EOS) == []
    assert open_ended.is_complete
    assert allowed(schema("regex", "").start()) == {EOS}


def test_every_eos_token_ends_a_text() -> None:
    vocabulary = GrammarVocabulary.from_tokenizer(ByteTokenizer(), 264, (EOS, ord("!"), 260))
    assert vocabulary is not None
    assert vocabulary.eos_token_ids == (EOS, ord("!")), "the tokenizer has no token 260"
    for end in (EOS, ord("!")):
        grammar = compile_schema(vocabulary.build(), "regex", "a*").start()
        assert allowed(grammar) == {ord("a"), EOS, ord("!")}
        grammar.advance(end)
        assert grammar.is_complete


@pytest.mark.parametrize(("kind", "text"), [("regex", "(ab|cd)+e{3}"), ("json", json.dumps(PERSON))])
def test_replay_leads_where_advancing_does(kind: str, text: str) -> None:
    compiled = schema(kind, text)
    grammar, rng, tokens = compiled.start(), random.Random(3), []
    while not grammar.is_complete:
        token = rng.choice(sorted(allowed(grammar)))
        tokens += [token, *grammar.advance(token)]
        replayed = compiled.start()
        replayed.replay(tokens)
        assert replayed.is_complete == grammar.is_complete
        assert grammar.is_complete or replayed.token_mask() == grammar.token_mask()
    with pytest.raises(InvalidRequest, match="not what structured_outputs allows"):
        compiled.start().replay([ord("!")])


def test_a_token_that_is_not_allowed_is_a_failure_and_no_exception() -> None:
    grammar = schema("regex", "ab").start()
    assert grammar.advance(ord("z")) == []
    assert grammar.failure is not None
    assert not grammar.is_complete
