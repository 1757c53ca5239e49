"""A model's text as a stream: in pieces with arbitrary boundaries."""

from __future__ import annotations

from itertools import pairwise

from pagemill.common.chat.syntax import ChatSyntax
from pagemill.producer.wire.chat.parser import ChatParser, parse_whole
from pagemill.producer.wire.chat.pieces import Answer


def in_chunks(syntax: ChatSyntax, text: str, cuts: list[int]) -> Answer:
    parser, answer = ChatParser(syntax), Answer()
    for start, end in pairwise([0, *sorted(cut % (len(text) + 1) for cut in cuts), len(text)]):
        answer.add(parser.feed(text[start:end]))
    answer.add(parser.finish())
    return answer


def read(syntax: ChatSyntax, text: str, cuts: list[int] | None = None) -> Answer:
    """The parse of the complete text, which pieces do not change: split here, and after every character."""
    whole = parse_whole(syntax, text)
    assert in_chunks(syntax, text, cuts or []) == whole
    assert in_chunks(syntax, text, list(range(len(text)))) == whole
    return whole
