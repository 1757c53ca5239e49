"""Reader of arguments in Gemma 4's format: JSON with bare names, and texts between marks instead of quotes."""

from __future__ import annotations

import json
import re
from typing import Any, Final

from pagemill.common.chat.markers import held_back
from pagemill.producer.wire.chat.pieces import as_json

_STRUCTURE: Final = re.compile(r"[{}\[\]]")
_MAX_DEPTH: Final = 64
"""Deeper arguments are left unchanged."""


class BareObject:
    """Finds the end of an object in a growing text, and converts the object."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._depth = 0
        self._in_text = False
        self._scanned = 0

    def scan(self, text: str) -> int | None:
        """Return the index after the object's end; None if it is incomplete.

        Args:
            text: the text of the previous call, extended.
        """
        while True:
            quote = text.find(self._quote, self._scanned)
            until = quote if quote >= 0 else len(text) - held_back(text, self._quote)
            if not self._in_text:
                for found in _STRUCTURE.finditer(text, self._scanned, until):
                    self._depth += 1 if found[0] in "{[" else -1
                    if self._depth <= 0:
                        return found.end()
            self._scanned = max(self._scanned, until)
            if quote < 0:
                return None
            self._in_text, self._scanned = not self._in_text, quote + len(self._quote)

    def as_json(self, text: str) -> str:
        """Return an object as JSON; other text is returned unchanged."""
        try:
            value = _Reader(text, self._quote).value(0)
            return as_json(value)
        except (ValueError, IndexError):
            return text


class _Reader:
    """Raises ValueError or IndexError for anything but a value."""

    def __init__(self, text: str, quote: str) -> None:
        self._text = text
        self._quote = quote
        self._at = 0

    def value(self, depth: int) -> Any:
        self._space()
        if depth > _MAX_DEPTH:
            raise ValueError("too deep")
        if self._text.startswith(self._quote, self._at):
            return self._quoted()
        match self._text[self._at]:
            case "{":
                return dict(self._members("}", depth, has_names=True))
            case "[":
                return [one for _, one in self._members("]", depth, has_names=False)]
        bare = self._until(",}]")
        try:
            return json.loads(bare)
        except ValueError:
            return bare

    def _members(self, end: str, depth: int, *, has_names: bool) -> list[tuple[str, Any]]:
        self._at += 1
        members: list[tuple[str, Any]] = []
        while True:
            self._space()
            if self._text[self._at] == end:
                self._at += 1
                return members
            name = self._name() if has_names else ""
            members.append((name, self.value(depth + 1)))
            self._space()
            if self._text[self._at] == ",":
                self._at += 1
            elif self._text[self._at] != end:
                raise ValueError("neither a comma nor the end")

    def _name(self) -> str:
        is_quoted = self._text.startswith(self._quote, self._at)
        name = self._quoted() if is_quoted else self._until(":").strip('"')
        self._space()
        if self._text[self._at] != ":":
            raise ValueError("a name without a value")
        self._at += 1
        return name

    def _quoted(self) -> str:
        start = self._at + len(self._quote)
        end = self._text.index(self._quote, start)
        self._at = end + len(self._quote)
        return self._text[start:end]

    def _until(self, ends: str) -> str:
        start = self._at
        while self._text[self._at] not in ends:
            self._at += 1
        return self._text[start : self._at].strip()

    def _space(self) -> None:
        while self._text[self._at].isspace():
            self._at += 1
