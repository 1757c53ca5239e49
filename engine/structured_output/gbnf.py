"""Prepares GBNF, llama.cpp's grammars, for llguidance's converter to Lark (1.9).

The converter drops leading zeros of hexadecimal escapes, which then represent other or no characters, and treats
a grammar with a rule named `start` as Lark.
"""

from __future__ import annotations

import re

_RULE = re.compile(r"(?m)^[ \t]*[A-Za-z][\w-]*[ \t]*::=")
_TOKEN = re.compile(r'"(?:\\.|[^"\\])*"|\[(?:\\.|[^\]\\])*\]|#[^\n]*|[\w-]+', re.DOTALL)
"""A literal, a class of characters, a comment, or a name."""
_ESCAPE = re.compile(r"\\(?:x([0-9A-Fa-f]{2})|u([0-9A-Fa-f]{4})|U([0-9A-Fa-f]{8})|.)", re.DOTALL)
_RESERVED = "start"


def is_gbnf(grammar: str) -> bool:
    """Return True if a grammar has a rule of GBNF."""
    return _RULE.search(grammar) is not None


def prepared(grammar: str) -> str:
    """Return the same grammar with characters in place of their escapes, and without a rule named `start`."""
    taken = set(_TOKEN.findall(grammar))
    name = next(name for number in range(len(taken) + 1) if (name := f"{_RESERVED}-{number}") not in taken)

    def rewrite(token: re.Match[str]) -> str:
        text = token[0]
        if text[0] in '"[':
            return _ESCAPE.sub(_character, text)
        return name if text.lower() == _RESERVED else text

    return _TOKEN.sub(rewrite, grammar)


def _character(escape: re.Match[str]) -> str:
    if escape.lastindex is None:
        return escape[0]
    code = int(escape[escape.lastindex], 16)
    if code < 0x80:  # it may be special in a literal or a class
        return f"\\x{code:02x}"
    is_character = code <= 0x10FFFF and not 0xD800 <= code <= 0xDFFF
    return chr(code) if is_character else escape[0]
