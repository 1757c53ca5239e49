"""Separates the reasoning of one output from the rest, in a text that arrives in chunks."""

from __future__ import annotations

from pagemill.common.chat.markers import held_back
from pagemill.common.chat.thinking import ThinkingTags


class ThinkingSplitter:
    """Splits one sample's text, in any chunks, into reasoning and the rest."""

    def __init__(self, tags: ThinkingTags, *, is_open: bool) -> None:
        self._tags = tags
        self._buffer = ""
        self._state = "thinking" if is_open else "start"
        self._has_reasoning = False

    def feed(self, text: str) -> tuple[str, str]:
        """Return the new reasoning and the new rest."""
        if self._state == "rest":
            return "", text
        self._buffer += text
        if self._state == "start":
            self._begin()
        reasoning = self._think() if self._state == "thinking" else ""
        return reasoning, self._rest()

    def finish(self) -> tuple[str, str]:
        """Return the text that was held back until the end."""
        held, self._buffer = self._buffer, ""
        if self._state == "thinking":
            return (held.rstrip() if self._has_reasoning else held.strip()), ""
        return "", "" if self._state == "closed" else held

    def _begin(self) -> None:
        """Decide whether the text starts with the opening tag, as soon as possible."""
        begun = self._buffer.lstrip()
        if begun.startswith(self._tags.opening):
            self._buffer = begun[len(self._tags.opening) :]
            self._state = "thinking"
        elif not self._tags.opening.startswith(begun):
            self._state = "rest"

    def _think(self) -> str:
        if not self._has_reasoning:
            self._buffer = self._buffer.lstrip()
        content, closing, rest = self._buffer.partition(self._tags.closing)
        if closing:
            self._buffer, self._state = rest, "closed"
            return content.rstrip()
        # White space before the closing tag is dropped: keep it until more follows.
        kept = held_back(content, self._tags.closing)
        ready = content[: len(content) - kept].rstrip()
        self._buffer = content[len(ready) :]
        self._has_reasoning = self._has_reasoning or bool(ready)
        return ready

    def _rest(self) -> str:
        if self._state == "closed":
            self._buffer = self._buffer.lstrip()
            if self._buffer:
                self._state = "rest"
        if self._state != "rest":
            return ""
        rest, self._buffer = self._buffer, ""
        return rest
