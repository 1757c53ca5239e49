"""The processes of schemas: rejected schemas, stopped processes, and the requests that continue afterwards."""

from __future__ import annotations

import gc
import json
import math
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from pagemill.common.structured_outputs import StructuredOutputs
from pagemill.engine.errors import (
    EngineError,
    InvalidRequest,
    SchemaInvalid,
    SchemaMismatch,
    SchemaTooComplex,
    UnsupportedFeature,
)
from pagemill.engine.llm import LLM
from pagemill.engine.outputs import Histogram
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.structured_output import compiler as compiler_module
from pagemill.engine.structured_output import served_grammar
from pagemill.engine.structured_output.compiler import SchemaCompiler
from pagemill.engine.structured_output.fork_server import ForkServer
from pagemill.engine.structured_output.matcher import compile_schema
from pagemill.engine.structured_output.messages import Answer
from pagemill.engine.structured_output.schema_process import SchemaProcess
from pagemill.engine.structured_output.served_grammar import MaskBudget, ServedGrammar
from pagemill.engine.structured_output.server import QUICK_LIMIT_S, TOKEN_LIMIT_S
from pagemill.engine.structured_output.vocabulary import GrammarVocabulary
from pagemill.engine.text.tokenizer import ByteTokenizer

VOCABULARY = GrammarVocabulary.from_tokenizer(ByteTokenizer(), 264, (256,))
assert VOCABULARY is not None
SLOW = json.dumps({"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(8000)}})
"""Takes seconds to compile: any of its optional properties may follow any other."""
ALTERNATIVES = "|".join(f'b "{number:x}"' for number in range(1999))
BOMB = f'start: /[a-z]{{40}}/ b\nb: "!"|{ALTERNATIVES}'
"""Costs almost nothing for 40 letters, and then seconds for one row of the parser, which no limit of the
library stops."""


def make(**limits: Any) -> SchemaCompiler:
    assert VOCABULARY is not None
    return SchemaCompiler(ForkServer(VOCABULARY, **limits), Histogram((1.0,)))


@pytest.fixture(scope="module")
def compiler() -> SchemaCompiler:
    return make()


def pump_until(compiler: SchemaCompiler, is_over: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 100
    while not is_over():
        assert time.monotonic() < deadline
        compiler.pump(0.1)


def start(compiler: SchemaCompiler, kind: str, text: str, budget: MaskBudget | None = None) -> ServedGrammar:
    """Raises the error of the compilation."""
    schema = compiler.compile(kind, text)
    grammar = schema.grammar(budget or MaskBudget())
    pump_until(compiler, lambda: schema.is_done)
    schema.check()
    return grammar


def take(compiler: SchemaCompiler, grammar: ServedGrammar, token: int) -> list[int]:
    grammar.prepare(token)
    pump_until(compiler, lambda: grammar.is_ready)
    return grammar.advance(token)


def allowed(mask: bytes) -> list[int]:
    return [token for token in range(264) if mask[token >> 3] >> (token & 7) & 1]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are listed there")
def test_outputs_go_on_exactly_when_processes_are_killed_at_any_moment() -> None:
    assert VOCABULARY is not None
    compiler, tokenizer, rng = make(), VOCABULARY.build(), random.Random(4)
    texts = [
        ("regex", "(ab|cd)+e{3}|[^x]+"),
        ("json", '{"type": "array", "items": {"enum": ["one", "two"]}}'),
        ("grammar", 'start: e\ne: e "+" e | /[0-9]+/'),
    ]
    rows = [(start(compiler, *text), compile_schema(tokenizer, *text).start()) for text in texts * 3]
    for step in range(40):
        rows = [row for row in rows if not row[1].is_complete]
        tokens = [rng.choice(allowed(own.token_mask())) for _, own in rows]
        for (served, _), token in zip(rows, tokens, strict=True):
            served.prepare(token)
        if step % 2:
            compiler.pump(rng.choice([0.0, 0.001]))
            for pid in rng.sample(children(compiler), 2):
                os.kill(pid, signal.SIGKILL)
        pump_until(compiler, lambda: all(served.is_ready for served, _ in rows))  # noqa: B023
        for (served, own), token in zip(rows, tokens, strict=True):
            assert served.advance(token) == own.advance(token)
            assert served.failure is None
            assert served.is_complete == own.is_complete
            assert own.is_complete or served.token_mask() == own.token_mask()


def children(compiler: SchemaCompiler) -> list[int]:
    process = compiler._fork_server.process
    assert process is not None
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


INVALID = [
    ("regex", "("), ("regex", "[a-"), ("regex", "a{3,2}"), ("json", '{"type": "nonsense"}'), ("json", "{"),
    ("json", '{"type":"integer","minimum":5,"maximum":3}'), ("json", "false"), ("grammar", "start: missing"),
    ("grammar", "no grammar at all"), ("grammar", ""), ("json", '{"$ref": "#/$defs/none"}'),
    ("json", '{"$defs":{"a":{"$ref":"#/$defs/a"}},"$ref":"#/$defs/a"}'), ("json", '{"type":"string","pattern":"("}'),
]  # fmt: skip
UNSUPPORTED = [
    ("json", '{"type":"string","pattern":"\\\\p{L}","not":{"pattern":"a"}}'), ("regex", "(?=a)a"), ("regex", r"\ba"),
]  # fmt: skip
TOO_COMPLEX = [
    ("regex", "(a?){3000}a{3000}"),
    ("json", json.dumps({"allOf": [{"oneOf": [{"required": [f"{i}{j}"]} for j in range(5)]} for i in range(8)]})),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "text", "error"),
    [(*case, SchemaInvalid) for case in INVALID]
    + [(*case, UnsupportedFeature) for case in UNSUPPORTED]
    + [(*case, SchemaTooComplex) for case in TOO_COMPLEX],
    ids=lambda value: value.__name__ if isinstance(value, type) else value[:40],
)
def test_what_can_t_be_used_is_refused_for_what_it_is(
    compiler: SchemaCompiler, kind: str, text: str, error: type[InvalidRequest]
) -> None:
    with pytest.raises(error, match=rf"structured_outputs\.{kind}: ") as refusal:
        start(compiler, kind, text)
    assert "\n" not in str(refusal.value)


def write(compiler: SchemaCompiler, grammar: ServedGrammar, text: str) -> None:
    data = list(text.encode())
    while data and grammar.failure is None:
        token = data.pop(0)
        assert token in allowed(grammar.token_mask())
        forced = take(compiler, grammar, token)
        assert forced == data[: len(forced)]
        del data[: len(forced)]


def test_an_output_of_a_wide_grammar_is_verified_at_its_end(compiler: SchemaCompiler) -> None:
    unique = '{"type": "array", "items": {"type": "integer"}, "uniqueItems": true}'
    good, bad = start(compiler, "json", unique), start(compiler, "json", unique)
    write(compiler, good, "[1, 2]")
    assert (good.is_complete, good.failure) == (True, None)
    write(compiler, bad, "[1, 1")
    assert bad.failure is None
    write(compiler, bad, "]")
    assert not bad.is_complete
    assert isinstance(bad.failure, SchemaMismatch)
    assert "uniqueItems" in str(bad.failure)


def test_an_output_that_ends_with_eos_is_verified_too(compiler: SchemaCompiler) -> None:
    text = '{"oneOf": [{"type": "integer", "minimum": 3}, {"type": "integer", "maximum": 7}]}'
    for number, is_right in (("9", True), ("5", False)):
        grammar = start(compiler, "json", text)
        write(compiler, grammar, number)
        take(compiler, grammar, 256)
        assert (grammar.is_complete, grammar.failure is None) == (is_right, is_right)


@pytest.mark.slow
def test_a_pattern_that_backtracks_without_end_fails_its_own_output() -> None:
    compiler = make()
    text = '{"type": "string", "maxLength": 60, "not": {"pattern": "^(a+)+$"}}'
    hostile, harmless = start(compiler, "json", text), start(compiler, "json", text)
    other = start(compiler, "regex", "b+")
    write(compiler, hostile, '"' + "a" * 45 + "!")
    began = time.process_time()
    write(compiler, hostile, '"')
    assert time.process_time() - began < 2.0, "it runs in another process"
    assert isinstance(hostile.failure, SchemaTooComplex)
    assert f"verifying the output, takes more than {TOKEN_LIMIT_S:g} s" in str(hostile.failure)
    write(compiler, harmless, '"b"')
    assert harmless.is_complete
    assert take(compiler, other, ord("b")) == []


def test_a_rewritten_schema_tells_how(compiler: SchemaCompiler) -> None:
    schema = compiler.compile("json", '{"type": "array", "uniqueItems": true}')
    user = schema.grammar(MaskBudget())
    pump_until(compiler, lambda: schema.is_done)
    assert user.failure is None
    (warning,) = schema.warnings
    assert "uniqueItems" in warning


@pytest.mark.parametrize(
    "text",
    ["(" * 30_000 + "a" + ")" * 30_000, "a" * 60_000, "(a?){5000}a{5000}", "(.*a){30}.{300}"],
    ids=range(4),
)
def test_nothing_that_is_compiled_brings_the_caller_down(compiler: SchemaCompiler, text: str) -> None:
    for kind in ("regex", "grammar"):
        schema = compiler.compile(kind, text if kind == "regex" else f"start: {text}")
        grammar = schema.grammar(MaskBudget())
        pump_until(compiler, lambda schema=schema: schema.is_done)
        assert grammar.failure is None
    start(compiler, "regex", "a+")


@pytest.mark.slow
def test_schemas_that_take_too_long_to_compile_are_ended_and_delay_nobody() -> None:
    impatient = make(time_limit_s=1.0)
    start(impatient, "regex", "a+")
    slow = [impatient.compile("json", SLOW + " " * number) for number in range(4)]
    users = [schema.grammar(MaskBudget()) for schema in slow]
    start(impatient, "regex", "b+")
    assert sum(schema.is_done for schema in slow) <= 2, "the others wait after their first try"
    pump_until(impatient, lambda: all(schema.is_done for schema in slow))
    for schema, user in zip(slow, users, strict=True):
        assert isinstance(schema.error, SchemaTooComplex)
        assert "takes more than 1 s" in str(schema.error)
        assert user.failure is None
    assert impatient.compile("json", SLOW) is slow[0], "what it ended in is remembered"


@pytest.mark.slow
def test_a_schema_that_takes_too_much_memory_to_compile_is_ended() -> None:
    small = make(time_limit_s=60.0, memory_limit_mib=8)
    start(small, "regex", "a+")
    with pytest.raises(SchemaTooComplex, match="or 8 MiB"):
        start(small, "regex", "|".join(f"{i:x}" * 8 for i in range(10_000)))
    start(small, "regex", "b+")


@pytest.mark.slow
def test_a_fork_server_that_was_killed_is_started_again() -> None:
    compiler = make()
    before = start(compiler, "regex", "a+")
    process = compiler._fork_server.process
    assert process is not None
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    start(compiler, "regex", "b+")
    assert take(compiler, before, ord("a")) == [], "what it had forked lives on"


@pytest.mark.slow
def test_each_text_is_compiled_once_and_so_is_each_mistake() -> None:
    compiler = make()
    first = start(compiler, "regex", "a+")
    assert compiler.compile("regex", "a+") is compiler.compile("regex", "a+")
    assert compiler.compile("grammar", "start: /a+/").grammar(MaskBudget()) is not first
    for _ in range(2):
        with pytest.raises(SchemaInvalid):
            start(compiler, "regex", "(")
    assert (compiler.hits, compiler.misses) == (3, 3)


@pytest.mark.slow
def test_a_failure_that_is_not_the_schema_s_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = make()
    with monkeypatch.context() as broken:
        broken.setattr("sys.executable", "/bin/false")
        with pytest.raises(EngineError, match="does not start"):
            start(compiler, "regex", "a+")
    start(compiler, "regex", "a+")


@pytest.mark.slow
def test_one_token_that_takes_too_long_ends_its_output_and_the_others_of_the_schema_go_on(
    compiler: SchemaCompiler,
) -> None:
    doomed = start(compiler, "grammar", BOMB)
    others = [compiler.compile("grammar", BOMB).grammar(MaskBudget()) for _ in range(3)]
    letters = iter(lambda: ord("x"), None)
    for number, letter in zip(range(45), letters, strict=False):
        doomed.prepare(letter)
        if number < 10:
            for other in others:
                other.prepare(letter)
        pump_until(compiler, lambda: doomed.is_ready and all(other.is_ready for other in others))
        if doomed.failure is not None:
            break
    assert isinstance(doomed.failure, SchemaTooComplex)
    for other in others:
        assert take(compiler, other, ord("y")) == []
        assert other.failure is None
        assert other.token_ids == [ord("x")] * 10 + [ord("y")]


@pytest.mark.slow
def test_a_token_that_takes_too_long_is_waited_for_once(compiler: SchemaCompiler) -> None:
    doomed = start(compiler, "grammar", BOMB)
    doomed.replay([ord("x")] * 39)
    pump_until(compiler, lambda: doomed.is_ready)
    doomed.prepare(ord("x"))
    compiler.wait_for_quick(0.05)
    compiler.wait_for_quick(math.inf)
    assert not doomed.is_ready
    pump_until(compiler, lambda: doomed.is_ready)
    assert isinstance(doomed.failure, SchemaTooComplex)


def test_masks_that_are_slow_again_and_again_delay_the_others_for_a_bounded_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """For 10 s, successive outputs take 0.1 s for their first mask, next to steps of 5 ms. With a simulated clock."""
    compiler = make()
    start(compiler, "regex", "a+")
    now, end = 0.0, 10.0
    monkeypatch.setattr(compiler_module.time, "perf_counter", lambda: now)
    monkeypatch.setattr(compiler, "_credited_at", now)
    schema, waited_s, answered_at, pending = compiler.compile("regex", "a+"), 0.0, 0.0, list[ServedGrammar]()

    def pump(timeout_s: float) -> None:
        nonlocal now
        now += min(timeout_s, max(0.0, answered_at - now))
        if now >= answered_at:
            schema.pending.clear()

    monkeypatch.setattr(compiler, "pump", pump)
    while now < end:
        if not schema.pending:
            pending.append(schema.grammar(MaskBudget()))
            pending[-1].prepare(ord("a"))
            answered_at = now + 0.1
        before = now
        compiler.wait_for_quick(0.05)
        waited_s += now - before
        now += 0.005
        pump(0.0)
    assert len(pending) > 90
    assert waited_s <= 0.15 + 0.05 * end + 0.001 * len(pending) + 1e-6


@pytest.mark.slow
def test_a_hostile_schema_delays_others_by_its_first_try_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """For any number of submissions: an ordinary schema is compiled after up to 0.3 s of CPU time of others."""
    compiler = make(time_limit_s=1.0)
    start(compiler, "regex", "a+")
    forks: list[None] = []
    fork = compiler._fork_server.fork
    monkeypatch.setattr(compiler._fork_server, "fork", lambda: forks.append(None) or fork())
    for number in range(3):
        users = [compiler.compile("json", SLOW).grammar(MaskBudget()) for _ in range(50)]
        forks.clear()
        start(compiler, "regex", f"b{{{number + 1}}}")
        assert len(forks) * QUICK_LIMIT_S <= 0.3
    assert users
    schema = compiler.compile("json", SLOW)
    pump_until(compiler, lambda: schema.is_done)
    assert isinstance(schema.error, SchemaTooComplex)


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1, 2])
def test_whoever_asks_beside_it_is_answered_by_another_process(compiler: SchemaCompiler, place: int) -> None:
    """Before it or after it: a reply that was ready may not have been sent when the process stopped."""
    doomed = start(compiler, "grammar", BOMB)
    doomed.replay([ord("x")] * 30)
    pump_until(compiler, lambda: doomed.is_ready)
    others = [compiler.compile("grammar", BOMB).grammar(MaskBudget()) for _ in range(2)]
    samples = [*others[:place], doomed, *others[place:]]
    while doomed.failure is None:
        assert len(doomed.token_ids) < 42
        for sample in samples:
            sample.prepare(ord("x"))
        pump_until(compiler, lambda: all(sample.is_ready for sample in samples))
    assert isinstance(doomed.failure, SchemaTooComplex)
    for other in others:
        assert other.failure is None
        assert len(other.token_ids) == len(doomed.token_ids) - 30 + 1
        assert set(allowed(other.token_mask())) == set(range(ord("a"), ord("z") + 1))


AMBIGUOUS = {
    "pairs": "start: s\ns: s s | /[a-z ]/",
    "pairs or nothing": "start: s\ns: s s | /[a-z ]/ | ",
    "triples": "start: s\ns: s s s | /[a-z ]/",
    "three rules": "start: a\na: b a c | b c | /[a-z]/\nb: a b | /[a-z ]/ | \nc: b a | /[a-z]/ | ",
}


@pytest.mark.slow
@pytest.mark.parametrize("text", AMBIGUOUS.values(), ids=AMBIGUOUS)
def test_an_ambiguous_grammar_ends_when_its_request_has_spent_its_time(
    compiler: SchemaCompiler, text: str
) -> None:
    budget = MaskBudget(seconds=served_grammar.REQUEST_LIMIT_S - 0.2)
    grammar, rng = start(compiler, "grammar", text, budget), random.Random(1)
    while grammar.failure is None:
        assert budget.num_tokens < 2000
        token = rng.choice([token for token in allowed(grammar.token_mask()) if token < 256])
        take(compiler, grammar, token)
    assert isinstance(grammar.failure, SchemaTooComplex)
    assert budget.seconds <= served_grammar.REQUEST_LIMIT_S + 0.002 * budget.num_tokens + TOKEN_LIMIT_S


def test_a_replay_is_not_charged_to_the_masks_budget(
    compiler: SchemaCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A long output that resumes does not have tokens on its account yet: its replay alone would use up the budget."""
    budget = MaskBudget()
    grammar = compiler.compile("regex", "[a-z]*").grammar(budget)
    answers: list[Answer] = []

    def noted(answer: Answer) -> None:
        answers.append(answer)
        ServedGrammar.answer(grammar, answer)

    monkeypatch.setattr(grammar, "answer", noted)
    grammar.replay([ord("x")] * 3000)
    pump_until(compiler, lambda: grammar.is_ready)
    take(compiler, grammar, ord("y"))
    replay, token = answers
    assert replay.replayed_s > 0
    assert token.replayed_s == 0
    assert budget.seconds == max(0.0, replay.seconds - replay.replayed_s) + token.seconds
    long = served_grammar.REQUEST_LIMIT_S + 9
    grammar.answer(token._replace(seconds=long, replayed_s=long))
    assert grammar.failure is None


PLAIN: dict[str, tuple[str, str]] = {
    "nested objects": ("json", json.dumps({"type": "object", "additionalProperties": False, "required": ["rows"],
        "properties": {"rows": {"type": "array", "items": {"type": "object", "properties": {
            f"field{i}": {"type": "object", "properties": {"name": {"type": "string"}, "tags": {
                "type": "array", "items": {"type": "string"}}, "n": {"type": "number"}},
                "required": ["name", "tags", "n"]} for i in range(20)}}}}})),
    "500 values": ("json", json.dumps({"type": "array", "items": {"enum": [f"category {i}" for i in range(500)]}})),
    "300 objects": ("json", json.dumps({"type": "array", "items": {"anyOf": [{"type": "object", "properties": {
        "kind": {"const": f"k{i}"}, "value": {"type": "number"}}, "required": ["kind", "value"],
        "additionalProperties": False} for i in range(300)]}})),
    "emails": ("json", '{"type": "array", "items": {"type": "string", "format": "email"}}'),
    "dates": ("json", '{"type": "array", "items": {"type": "string", "format": "date-time"}}'),
    "long strings": ("json", '{"type": "array", "items": {"type": "string", "maxLength": 4000}}'),
    "any JSON": ("json", "{}"),
    "sentences": ("regex", r"([A-Z][a-z]{1,20}( [a-z]{1,20}){2,40}\\. ){1,20}"),
    "expressions": ("grammar", 'start: e\ne: e "+" e | e "*" e | "(" e ")" | NUM\nNUM: /[0-9]+/'),
    "GBNF": ("grammar", 'root ::= (expr "=" ws term "\\n")+\nexpr ::= term ([-+*/] term)*\nterm ::= ident | num | '
        '"(" ws expr ")" ws\nident ::= [a-z] [a-z0-9_]* ws\nnum ::= [0-9]+ ws\nws ::= [ \\t\\n]*'),
}  # fmt: skip


@pytest.mark.parametrize(("kind", "text"), PLAIN.values(), ids=PLAIN)
def test_ordinary_schemas_stay_far_below_the_limits(compiler: SchemaCompiler, kind: str, text: str) -> None:
    budget = MaskBudget()
    rng = random.Random(2)
    for _ in range(4):
        grammar = start(compiler, kind, text, budget)
        for _ in range(150):
            take(compiler, grammar, rng.choice(allowed(grammar.token_mask())))
            assert grammar.failure is None
            if grammar.is_complete:
                break
    assert budget.seconds < 0.2 + 0.001 * budget.num_tokens


def test_an_output_that_fills_the_lexer_alone_fails_and_one_that_finds_it_full_does_not(
    compiler: SchemaCompiler,
) -> None:
    """All outputs of a schema share a lexer, whose states are limited: other clients may have used them up."""
    kind, text = "regex", "((a{1,1000}){1,1000}){1,1000}"
    lengths: list[int] = []
    for _ in range(2):
        grammar = start(compiler, kind, text)
        while grammar.failure is None:
            assert len(grammar.token_ids) < 100
            take(compiler, grammar, ord("a"))
        assert isinstance(grammar.failure, SchemaTooComplex)
        lengths.append(len(grammar.token_ids))
    assert lengths[0] > 20
    assert lengths[0] == lengths[1], "each gets as far as the first"


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are counted there")
def test_a_process_forgets_outputs_that_are_over_and_ends_when_it_is_dropped() -> None:
    compiler = make()
    grammar = start(compiler, "regex", "[ab]+")
    schema = compiler.compile("regex", "[ab]+")
    take(compiler, grammar, ord("a"))
    assert schema._known == {grammar.number}
    del grammar
    gc.collect()
    assert not schema.is_used
    take(compiler, start(compiler, "regex", "[ab]+"), ord("b"))
    assert len(schema._known) == 1
    assert len(children(compiler)) == 1
    schema.close()
    deadline = time.monotonic() + 30
    while children(compiler):
        assert time.monotonic() < deadline
        time.sleep(0.01)


ORPHANS = """
import json, time
from tests.engine.structured_output.test_processes import children, make, start
compiler = make()
grammars = [start(compiler, "regex", f"[ab]{{{number},}}") for number in range(3)]
print(json.dumps([compiler._fork_server.process.pid, *children(compiler)]), flush=True)
time.sleep(600)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the children are counted there")
def test_nothing_is_left_of_an_engine_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHANS], stdout=subprocess.PIPE, text=True) as engine:
        assert engine.stdout is not None
        processes = json.loads(engine.stdout.readline())
        assert len(processes) == 4
        engine.kill()
    deadline = time.monotonic() + 60
    while any(map(is_running, processes)):
        assert time.monotonic() < deadline
        time.sleep(0.01)


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    try:
        return stat.read_text().rpartition(")")[2].split()[0] != "Z"  # only the new parent can reap a zombie
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[SchemaCompiler]:
    monkeypatch.setattr(compiler_module, "MAX_BYTES", 40 << 20)
    monkeypatch.setattr(compiler_module, "MOST_BYTES", 80 << 20)
    compiler = make()
    yield compiler
    for schema in compiler._known.values():
        schema.close()


@pytest.mark.slow
def test_what_is_not_used_is_dropped_by_bytes(small: SchemaCompiler) -> None:
    for number in range(60):
        start(small, "regex", f"[a-z]{{{number}}}")
        assert small.num_bytes <= 40 << 20 or number < 2
    assert 1 <= len(small._known) < 60
    for number in range(20):
        with pytest.raises(SchemaInvalid):
            start(small, "regex", "(" * 30_000 + str(number))
    assert small.num_bytes <= 40 << 20


@pytest.mark.slow
def test_what_is_remembered_is_bounded_by_number_too(
    small: SchemaCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compiler_module, "MAX_SCHEMAS", 10)
    for number in range(30):
        with pytest.raises(SchemaInvalid):
            start(small, "regex", f"({number}")
        assert len(small._known) <= 11, "the newest comes on top"


@pytest.mark.slow
def test_a_mistake_that_is_remembered_keeps_nobody_who_made_it(small: SchemaCompiler) -> None:
    for _ in range(2):
        with pytest.raises(SchemaInvalid):
            start(small, "regex", "(")
    (schema,) = small._known.values()
    assert not schema.is_used
    resumed = schema.grammar(MaskBudget())
    resumed.replay([ord("x")])
    assert isinstance(resumed.failure, SchemaInvalid)
    assert schema.socket is None, "nothing is compiled again for it"


@pytest.mark.slow
def test_nothing_is_compiled_while_what_is_used_takes_all(small: SchemaCompiler) -> None:
    users = []
    while small.num_bytes <= 40 << 20:
        users.append(start(small, "regex", f"x{{{len(users)}}}y"))
    waiting = small.compile("regex", "a+")
    user = waiting.grammar(MaskBudget())
    for _ in range(20):
        small.pump(0.01)
    assert not waiting.is_done
    users.clear()
    gc.collect()
    pump_until(small, lambda: waiting.is_done)
    assert user.token_mask() != b""


@pytest.mark.slow
def test_the_largest_ends_when_those_in_use_take_too_much(small: SchemaCompiler) -> None:
    users = [start(small, "regex", f"x{{{number}}}y") for number in range(3)]
    schemas: list[SchemaProcess] = list(small._known.values())
    schemas[1]._process_bytes = 100 << 20
    small._make_room()
    assert [user.failure is not None for user in users] == [False, True, False]
    assert isinstance(users[1].failure, SchemaTooComplex)


@pytest.mark.slow
def test_closing_an_engine_ends_the_processes() -> None:
    this = psutil.Process()
    before = set(this.children(recursive=True))
    llm = LLM("echo", num_kv_blocks=64)
    llm.generate("aaa", SamplingParams(max_tokens=4, structured_outputs=StructuredOutputs(regex="a+")))
    started = set(this.children(recursive=True)) - before
    assert len(started) == 2, "the first process, and the schema's"
    llm.close()
    llm.close()

    def runs(process: psutil.Process) -> bool:
        try:
            return process.status() != psutil.STATUS_ZOMBIE
        except psutil.NoSuchProcess:
            return False

    give_up = time.monotonic() + 60
    while any(map(runs, started)):
        assert time.monotonic() < give_up
        time.sleep(0.01)
