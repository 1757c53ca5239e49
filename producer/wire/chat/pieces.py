"""The parts of a generated text, and the answer that they form."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, Literal

from pagemill.common.chat.families import ToolSyntax
from pagemill.common.json_values import is_unicode

MAX_NAME: Final = 128


def as_json(value: Any) -> str:
    """Return JSON, with escapes if the value has lone surrogates. Raises ValueError for NaN and infinities."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if is_unicode(text) else json.dumps(value, allow_nan=False)


def is_function_name(name: str) -> bool:
    """Return whether a result can have this name of a function."""
    return 0 < len(name) <= MAX_NAME and is_unicode(name)


@dataclass(frozen=True, slots=True)
class Piece:
    """A fragment of a sample: reasoning, content, or the arguments of a tool call."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    number: int = 0
    """The number of the call, from 0."""
    name: str | None = None
    """The function's name, in a call's first fragment."""


class ContentWriter:
    """Writes the content around calls: a line break takes the place of a call and the white space around it."""

    def __init__(self) -> None:
        self._space = ""
        """White space that is content only if more text follows."""
        self._has_calls = False
        self._is_after_call = False
        """No content has followed the last call yet."""
        self._has_content = False

    def write(self, pieces: list[Piece], text: str) -> None:
        """Write content, except trailing white space, and white space directly after a call."""
        if self._is_after_call:
            text = text.lstrip()
            if not text:
                return
            self._is_after_call = False
            self._space = "\n" if self._has_content else ""
        ready = text.rstrip()
        if ready:
            pieces.append(Piece("content", self._space + ready))
            self._space, self._has_content = "", True
        self._space += text[len(ready) :]

    def begin_call(self) -> None:
        """Drop the white space before a call."""
        self._space, self._has_calls, self._is_after_call = "", True, True

    def finish(self, pieces: list[Piece]) -> None:
        """Write white space at the end of a text without calls."""
        if not self._has_calls and self._space:
            pieces.append(Piece("content", self._space))


class TextFinder:
    """A state machine that splits one sample's text, in any chunks, into content and calls.

    A state consumes what it can from the buffer, and returns True if another step may follow.
    """

    _state: Callable[[list[Piece]], bool]

    def __init__(self, syntax: ToolSyntax) -> None:
        self._syntax = syntax
        self._buffer = ""
        self._text = ContentWriter()
        self._num_calls = 0
        self._is_final = False

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the text adds."""
        self._buffer += text
        pieces: list[Piece] = []
        while self._state(pieces):
            pass
        return pieces

    def _is_cut_mark(self, rest: str) -> bool:
        """Return whether the text's end is a mark after a call, cut off by `max_tokens`."""
        return rest != "" and any(mark.startswith(rest) for mark in self._syntax.skipped)


@dataclass(slots=True)
class Call:
    """A tool call so far. `arguments` is JSON as the model wrote it: unchecked, and possibly cut off."""

    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """The sum of one sample's pieces."""

    reasoning: str = ""
    content: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        for piece in pieces:
            match piece.kind:
                case "reasoning":
                    self.reasoning += piece.text
                case "content":
                    self.content += piece.text
                case "call":
                    if piece.name is not None:
                        self.calls.append(Call(piece.name))
                    self.calls[piece.number].arguments += piece.text
