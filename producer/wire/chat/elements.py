"""Finds tool calls with non-JSON arguments in a text that arrives in chunks, and writes them as JSON."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable, Collection, Mapping
from typing import Any, Final

from pagemill.common.chat.families import HEADER_LIMIT, Elements, ToolSyntax
from pagemill.common.chat.markers import held_back
from pagemill.producer.wire.chat.bare_names import BareObject
from pagemill.producer.wire.chat.pieces import Piece, TextFinder, as_json, is_function_name

_MAX_LITERAL: Final = 4096
"""Maximum characters of a value in Python notation, in which some templates show values to their models."""


class ElementFinder(TextFinder):
    """Splits one sample's text into content and calls.

    The output does not depend on how the text was split into chunks. A call is returned once its header is
    complete, each argument once it has ended, and texts as they arrive.
    """

    def __init__(self, syntax: ToolSyntax, values: Mapping[str, Collection[str]]) -> None:
        """`values` has, by function, the parameters whose values are not texts."""
        super().__init__(syntax)
        self._values = values
        self._name = ""
        self._num_arguments = 0
        self._is_text = False
        self._has_text = False
        """The text of an argument has started."""
        self._bare = BareObject(syntax.quote)
        self._state = self._content

    def finish(self) -> list[Piece]:
        """Return the text that was held back until the end."""
        self._is_final = True
        if self._state == self._after and self._is_cut_mark(self._buffer.lstrip()):
            self._buffer = ""
        pieces = self.feed("")
        if self._state == self._content:
            self._text.write(pieces, self._buffer)
        self._buffer = ""
        self._text.finish(pieces)
        return pieces

    def _content(self, pieces: list[Piece]) -> bool:
        marks = self._syntax.opens
        places = [at for mark in marks if (at := self._buffer.find(mark)) >= 0]
        if places:
            at = min(places)
            self._text.write(pieces, self._buffer[:at])
            self._buffer, self._state = self._buffer[at:], self._header
            return True
        kept = max(held_back(self._buffer, mark) for mark in marks)
        ready = len(self._buffer) - kept
        self._text.write(pieces, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _after(self, pieces: list[Piece]) -> bool:
        """Skip text after a call."""
        self._buffer = self._buffer.lstrip()
        if not self._buffer:
            return False
        for mark in self._syntax.skipped:
            if self._buffer.startswith(mark):
                self._buffer = self._buffer[len(mark) :]
                return True
        if not self._is_final and any(mark.startswith(self._buffer) for mark in self._syntax.skipped):
            return False
        self._state = self._content
        return True

    def _header(self, pieces: list[Piece]) -> bool:
        """Start a call, or find that an opening mark was content."""
        header = self._syntax.header.match(self._buffer[:HEADER_LIMIT])
        if header is not None and is_function_name(header["name"]):
            self._buffer = self._buffer[header.end() :]
            self._name, self._num_arguments = header["name"], 0
            pieces.append(Piece("call", "", self._num_calls, self._name))
            self._num_calls += 1
            self._text.begin_call()
            self._bare = BareObject(self._syntax.quote)
            self._state = self._bare_arguments if self._syntax.elements is None else self._arguments
            return True
        if len(self._buffer) < HEADER_LIMIT and not self._is_final:
            return False
        mark = max((mark for mark in self._syntax.opens if self._buffer.startswith(mark)), key=len)
        self._text.write(pieces, mark)
        self._buffer = self._buffer[len(mark) :]
        self._state = self._content
        return True

    def _bare_arguments(self, pieces: list[Piece]) -> bool:
        """Read an object as a whole; its end is known once it is complete."""
        end = self._bare.scan(self._buffer)
        if end is None:
            return False
        self._write(pieces, self._bare.as_json(self._buffer[:end]))
        self._buffer = self._buffer[end:]
        self._state = self._after
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        """Start an argument, or end the call."""
        elements = self._elements
        window = self._buffer[:HEADER_LIMIT]
        rest = window.lstrip()
        skipped = len(window) - len(rest)
        if rest.startswith(elements.call_end):
            self._buffer = self._buffer[skipped + len(elements.call_end) :]
            self._end(pieces)
            return True
        if (header := elements.header.match(rest)) is not None:
            self._buffer = self._buffer[skipped + header.end() :]
            self._is_text = header.groupdict().get("is_text") == "true" or (
                header.groupdict().get("is_text") is None
                and header["key"] not in self._values.get(self._name, ())
            )
            separator = ", " if self._num_arguments else "{"
            self._write(pieces, f"{separator}{as_json(header['key'])}: " + ('"' if self._is_text else ""))
            self._num_arguments, self._has_text = self._num_arguments + 1, False
            self._state = self._value
            return True
        if any(rest.startswith(mark) for mark in (*self._syntax.skipped, *self._syntax.opens)):
            self._end(pieces)  # the model omitted the end of the call
            return True
        if len(window) == HEADER_LIMIT:
            self._end(pieces)
            return True
        return False

    def _value(self, pieces: list[Piece]) -> bool:
        elements = self._elements
        end = self._buffer.find(elements.end)
        if not self._is_text:
            if end < 0:
                return False
            self._write(pieces, _value_json(self._trimmed(self._buffer[:end])))
        else:
            if elements.trims_lines and not self._has_text and self._buffer[:1] == "\n":
                self._buffer, end = self._buffer[1:], end - 1 if end >= 0 else end
                self._has_text = True
            ready = self._buffer[:end] if end >= 0 else self._ready_text(elements)
            if end >= 0 and elements.trims_lines:
                ready = ready.removesuffix("\n")
            self._has_text = self._has_text or bool(self._buffer)
            self._write(pieces, as_json(ready)[1:-1] + ('"' if end >= 0 else ""))
            if end < 0:
                self._buffer = self._buffer[len(ready) :]
                return False
        self._buffer = self._buffer[end + len(elements.end) :]
        self._state = self._arguments
        return True

    def _ready_text(self, elements: Elements) -> str:
        """Return the part of an incomplete text that is certain."""
        ready = self._buffer[: len(self._buffer) - held_back(self._buffer, elements.end)]
        return ready[:-1] if elements.trims_lines and ready.endswith("\n") else ready

    def _trimmed(self, text: str) -> str:
        return text.removeprefix("\n").removesuffix("\n") if self._elements.trims_lines else text

    def _end(self, pieces: list[Piece]) -> None:
        self._write(pieces, "}" if self._num_arguments else "{}")
        self._state = self._after

    @property
    def _elements(self) -> Elements:
        assert self._syntax.elements is not None
        return self._syntax.elements

    def _write(self, pieces: list[Piece], text: str) -> None:
        if text:
            pieces.append(Piece("call", text, self._num_calls - 1))


def _value_json(text: str) -> str:
    """Return a value as JSON; as a string if it is not valid JSON."""
    text = text.strip()
    readers: list[Callable[[str], Any]] = [json.loads]
    if len(text) <= _MAX_LITERAL:
        readers.append(ast.literal_eval)
    for read in readers:
        try:
            return as_json(read(text))
        except (ValueError, TypeError, SyntaxError, RecursionError, MemoryError):
            continue
    return as_json(text)
