"""`regex`, `json` and `grammar`: matchers, and the process that tries them out, over an alphabet of bytes."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal

import pytest

from pagemill.engine.errors import (
    EngineError,
    InvalidRequest,
    SchemaInvalid,
    SchemaTooComplex,
    UnsupportedFeature,
)
from pagemill.engine.outputs import Histogram
from pagemill.engine.structured_output.compiler import SchemaCompiler
from pagemill.engine.structured_output.matcher import CompiledSchema, MatcherGrammar, compile_schema
from pagemill.engine.structured_output.probe import SchemaProbe
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import ByteTokenizer

EOS = 256
VOCABULARY = GrammarVocabulary.of(ByteTokenizer(), 264, (EOS,))
assert VOCABULARY is not None
TOKENIZER = VOCABULARY.build()
PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "age": {"type": "integer"}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
SLOW = json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}})
"""Takes seconds to compile: each of its optional properties may follow each other."""


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
    vocabulary = GrammarVocabulary.of(ByteTokenizer(), 264, (EOS, ord("!"), 260))
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


INVALID = [
    ("regex", "("), ("regex", "[a-"), ("regex", "a{3,2}"), ("json", '{"type": "nonsense"}'), ("json", "{"),
    ("json", '{"type":"integer","minimum":5,"maximum":3}'), ("json", "false"), ("grammar", "start: missing"),
    ("grammar", "no grammar at all"), ("grammar", ""), ("json", '{"$ref": "#/$defs/none"}'),
    ("json", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'), ("json", '{"type":"string","pattern":"("}'),
]  # fmt: skip
UNSUPPORTED = [
    ("json", '{"type":"array","uniqueItems":true}'), ("json", '{"not":{"type":"string"}}'),
    ("json", '{"type":"string","format":"made-up"}'), ("regex", "(?=a)a"), ("regex", r"\ba"),
]  # fmt: skip
TOO_COMPLEX = [
    ("regex", "(a?){3000}a{3000}"),
    ("json", json.dumps({"allOf": [{"oneOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(8)]})),
]  # fmt: skip


@pytest.fixture(scope="module")
def probe() -> SchemaProbe:
    assert VOCABULARY is not None
    return SchemaProbe(VOCABULARY)


@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [(*case, SchemaInvalid) for case in INVALID]
    + [(*case, UnsupportedFeature) for case in UNSUPPORTED]
    + [(*case, SchemaTooComplex) for case in TOO_COMPLEX],
    ids=lambda value: value.__name__ if isinstance(value, type) else value[:40],
)
def test_what_can_t_be_used_is_refused_for_what_it_is(
    probe: SchemaProbe, kind: str, text: str, error: type[InvalidRequest]
) -> None:
    with pytest.raises(error, match=rf"structured_outputs\.{kind}: ") as refusal:
        probe.check(kind, text)
    assert "\n" not in str(refusal.value)
    probe.check("regex", "a+")


@pytest.mark.parametrize(
    "text",
    ["(" * 30_000 + "a" + ")" * 30_000, "a" * 60_000, "(a?){5000}a{5000}", "(.*a){30}.{300}"],
    ids=range(4),
)
def test_nothing_brings_the_caller_down(probe: SchemaProbe, text: str) -> None:
    for kind in ("regex", "grammar"):
        with contextlib.suppress(InvalidRequest):
            probe.check(kind, text if kind == "regex" else f"start: {text}")
    probe.check("regex", "a+")


def test_a_schema_that_takes_too_long_is_ended() -> None:
    assert VOCABULARY is not None
    impatient = SchemaProbe(VOCABULARY, time_limit_s=0.2)
    impatient.check("regex", "a+")
    with pytest.raises(SchemaTooComplex, match=r"takes more than 0\.2 s"):
        impatient.check("json", SLOW)
    impatient.check("regex", "b+")


def test_a_schema_that_takes_too_much_memory_is_ended() -> None:
    assert VOCABULARY is not None
    small = SchemaProbe(VOCABULARY, time_limit_s=60.0, memory_limit_mib=8)
    small.check("regex", "a+")
    with pytest.raises(SchemaTooComplex, match="or 8 MiB"):
        small.check("regex", "|".join(f"{i:x}" * 8 for i in range(10_000)))
    small.check("regex", "b+")


def test_a_probe_that_was_killed_is_started_again(probe: SchemaProbe) -> None:
    probe.check("regex", "a")
    assert probe._process is not None
    os.kill(probe._process.pid, signal.SIGKILL)
    probe._process.wait()
    probe.check("regex", "a")


def test_each_text_is_compiled_once_and_so_is_each_mistake() -> None:
    assert VOCABULARY is not None
    compiler = SchemaCompiler(VOCABULARY, Histogram((1.0,)))
    first = compiler.compile("regex", "a+")
    assert (
        first.result().start().token_mask() == compiler.compile("regex", "a+").result().start().token_mask()
    )
    assert compiler.compile("grammar", "start: /a+/").result() is not first.result()
    for _ in range(2):
        with pytest.raises(SchemaInvalid):
            compiler.compile("regex", "(").result()
    assert (compiler.hits, compiler.misses) == (2, 3)
    assert sum(compiler.seconds.snapshot().counts) == 3


def test_a_failure_that_is_not_the_schema_s_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert VOCABULARY is not None
    compiler = SchemaCompiler(VOCABULARY, Histogram((1.0,)))
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        with pytest.raises(EngineError, match="does not start"):
            compiler.compile("regex", "a+").result()
    assert compiler.compile("regex", "a+").result().kind == "regex"
