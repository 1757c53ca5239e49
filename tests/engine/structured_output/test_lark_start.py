"""Lark's forms of the first rule."""

from __future__ import annotations

import llguidance
import pytest

from pagemill.engine.structured_output.matcher import _grammar


@pytest.mark.parametrize(
    "start", ["start:", "?start:", "!start:", "?start :", "  ?start:", "?start.2:", "?!start:"]
)
def test_the_first_rule_may_have_modifiers(start: str) -> None:
    grammar = _grammar(
        "grammar", f'// x\n{start} sum\n?sum: NUMBER | sum "+" NUMBER -> add\nNUMBER: /[0-9]+/\n'
    )
    assert not llguidance.LLMatcher.validate_grammar(grammar)


def test_gbnf_is_still_read() -> None:
    assert not llguidance.LLMatcher.validate_grammar(
        _grammar("grammar", 'root ::= "a" more\nmore ::= "b"?\n')
    )
