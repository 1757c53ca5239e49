"""Finds tool calls in a text that arrives in chunks; everything else is content."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pagemill.common.chat.families import HEADER_LIMIT, ToolSyntax
from pagemill.common.chat.markers import held_back
from pagemill.producer.wire.chat.pieces import Piece, TextFinder, as_json, is_function_name

_STRUCTURE: Final = re.compile(r'["{}\[\]]')
_STRING_END: Final = re.compile(r'["\\]')


class JsonScanner:
    """Finds the end of a JSON object or array by its brackets, in any chunks."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self._is_escaped = False

    def scan(self, text: str) -> int | None:
        """Return the index in `text` after the value's last character; None if it is incomplete."""
        at = 0
        while at < len(text):
            if self._is_escaped:
                self._is_escaped, at = False, at + 1
                continue
            found = (_STRING_END if self._in_string else _STRUCTURE).search(text, at)
            if found is None:
                return None
            at = found.end()
            character = found[0]
            if character == "\\":
                self._is_escaped = True
            elif character == '"':
                self._in_string = not self._in_string
            else:
                self._depth += 1 if character in "{[" else -1
                if self._depth <= 0:
                    return at
        return None


class CallFinder(TextFinder):
    """Splits one sample's text into content and calls.

    The output does not depend on how the text was split into chunks. A call is returned once its name and the
    start of its arguments are complete; its arguments then follow as they arrive.
    """

    def __init__(self, syntax: ToolSyntax) -> None:
        super().__init__(syntax)
        self._raw = ""
        """Text read since the possible start of a call: content, if none has started."""
        self._scanner = JsonScanner()
        self._scanned = 0
        self._state = self._content if syntax.opens else self._between

    def finish(self) -> list[Piece]:
        """Return the text that was held back until the end."""
        self._is_final = True
        if self._num_calls and self._state == self._between and self._is_cut_mark(self._buffer.lstrip()):
            self._buffer = ""
        pieces = self.feed("")
        if self._state not in (self._arguments, self._tail):
            self._text.write(pieces, self._raw + self._buffer)
        self._raw = self._buffer = ""
        self._text.finish(pieces)
        return pieces

    def _content(self, pieces: list[Piece]) -> bool:
        places = [
            (at, -len(mark), mark) for mark in self._syntax.opens if (at := self._buffer.find(mark)) >= 0
        ]
        if places:
            at, _, mark = min(places)
            self._text.write(pieces, self._buffer[:at])
            self._buffer, self._raw = self._buffer[at + len(mark) :], mark
            self._state = self._between
            return True
        kept = max((held_back(self._buffer, mark) for mark in self._syntax.opens), default=0)
        ready = len(self._buffer) - kept
        self._text.write(pieces, self._buffer[:ready])
        self._buffer = self._buffer[ready:]
        return False

    def _between(self, pieces: list[Piece]) -> bool:
        """Skip text around calls, and decide whether another call starts."""
        rest = self._buffer.lstrip()
        self._skip(len(self._buffer) - len(rest))
        if not rest:
            return False
        marks = (*self._syntax.skipped, *self._syntax.opens)
        if not self._is_final and any(mark.startswith(rest) and mark != rest for mark in marks):
            return False
        for mark in sorted(self._syntax.skipped, key=len, reverse=True):
            if rest.startswith(mark):
                self._skip(len(mark))
                return True
        is_call = rest.startswith("{") if self._syntax.is_wrapped else bool(self._raw)
        if is_call:
            self._scanner, self._scanned = JsonScanner(), 0
            self._state = self._header
        else:
            self._give_up(pieces)
        return True

    def _header(self, pieces: list[Piece]) -> bool:
        header = self._syntax.header.match(self._buffer[:HEADER_LIMIT])
        if header is not None:
            self._begin(pieces, header["name"])
            self._buffer = self._buffer[header.end() :]
            self._scanner = JsonScanner()
            self._state = self._arguments
            return True
        if not self._syntax.is_wrapped:
            if len(self._buffer) < HEADER_LIMIT:
                return False
            self._give_up(pieces)
            return True
        end = self._scanner.scan(self._buffer[self._scanned :])
        if end is None:
            self._scanned = len(self._buffer)
            return False
        return self._read_reordered(pieces, self._scanned + end)

    def _read_reordered(self, pieces: list[Piece], end: int) -> bool:
        """Read a complete object whose members are in another order."""
        call = _read_call(self._buffer[:end])
        if call is None:
            self._raw, self._buffer = self._raw + self._buffer[:end], self._buffer[end:]
            self._give_up(pieces)
            return True
        self._begin(pieces, call[0])
        pieces.append(Piece("call", call[1], self._num_calls - 1))
        self._buffer = self._buffer[end:]
        self._state = self._between
        return True

    def _arguments(self, pieces: list[Piece]) -> bool:
        end = self._scanner.scan(self._buffer)
        call_text = self._buffer if end is None else self._buffer[:end]
        if call_text:
            pieces.append(Piece("call", call_text, self._num_calls - 1))
        self._buffer = self._buffer[len(call_text) :]
        if end is None:
            return False
        self._scanner = JsonScanner(depth=1)
        self._state = self._tail if self._syntax.is_wrapped else self._between
        return True

    def _tail(self, pieces: list[Piece]) -> bool:
        """Skip the members of an object after the arguments."""
        end = self._scanner.scan(self._buffer)
        self._buffer = "" if end is None else self._buffer[end:]
        if end is None:
            return False
        self._state = self._between
        return True

    def _begin(self, pieces: list[Piece], name: str) -> None:
        pieces.append(Piece("call", "", self._num_calls, name))
        self._num_calls += 1
        self._raw = ""
        self._text.begin_call()

    def _skip(self, length: int) -> None:
        # After a call, the text around it is never content.
        if self._raw or not self._num_calls:
            self._raw += self._buffer[:length]
        self._buffer = self._buffer[length:]

    def _give_up(self, pieces: list[Piece]) -> None:
        """Continue with content: no call starts here."""
        self._text.write(pieces, self._raw)
        self._raw = ""
        self._state = self._content
        if not self._syntax.opens:
            self._text.write(pieces, self._buffer)
            self._buffer = ""


def _read_call(text: str) -> tuple[str, str] | None:
    """Return a call's name and arguments from its object; None if it is not a call."""
    try:
        call: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if isinstance(call, dict) and isinstance(call.get("function"), dict):
        call = call["function"]
    if (
        not isinstance(call, dict)
        or not isinstance(call.get("name"), str)
        or not is_function_name(call["name"])
    ):
        return None
    for member in ("arguments", "parameters"):
        if member in call:
            arguments = call[member]
            if isinstance(arguments, str):  # JSON in a text; an escape is what it had
                return call["name"], arguments.encode(errors="backslashreplace").decode()
            try:
                return call["name"], as_json({} if arguments is None else arguments)
            except ValueError:
                return None
    return None
