"""GBNF, llama.cpp's grammars, in forms that the converter to Lark misreads."""

from __future__ import annotations

import pytest

from pagemill.engine.errors import SchemaInvalid
from pagemill.engine.structured_output.matcher import compile_schema
from tests.engine.structured_output.test_numbers import allows
from tests.engine.structured_output.test_rewritten import TOKENIZER


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r'root ::= "\u00e9dad"', "édad", "\ue9dad"),
        (r'root ::= "\u0007\U0001F642\x41\xe9"', "\x07🙂Aé", "\x07🙂A"),
        (r"root ::= [\u00e0-\u00ef]{2}", "éâ", "ea"),
        (r"root ::= [a\u002dz]", "-", "b"),
        (r"root ::= [\u005d\u005b]", "]", "u"),
        (r'root ::= "\u0022\u005c\n"', '"\\\n', "n"),
        (r'root ::= "\\u0041"', r"\u0041", "A"),
        ('root ::= start\nstart ::= "q" | "start" # start', "start", "start-0"),
        ('root ::= Start start-0\nStart ::= "q"\nstart-0 ::= "r"', "qr", "q"),
        ('start: "q" | "::="', "::=", "root"),
    ],
)
def test_what_a_grammar_allows(grammar: str, good: str, bad: str) -> None:
    schema = compile_schema(TOKENIZER, "grammar", grammar)
    assert allows(schema, good)
    assert not allows(schema, bad)


@pytest.mark.parametrize("grammar", [r'root ::= "\ud83d"', r'root ::= "\U00110000"', 'start ::= "a"'])
def test_grammars_without_a_meaning_are_refused(grammar: str) -> None:
    with pytest.raises(SchemaInvalid):
        compile_schema(TOKENIZER, "grammar", grammar)
