"""The parser of one sample's text, by the syntax that the worker recorded."""

from __future__ import annotations

from pagemill.common.chat.families import find_tools
from pagemill.common.chat.syntax import ChatSyntax
from pagemill.common.chat.thinking import HARMONY, THINKING
from pagemill.producer.wire.chat.calls import CallFinder
from pagemill.producer.wire.chat.elements import ElementFinder
from pagemill.producer.wire.chat.harmony import HarmonyParser
from pagemill.producer.wire.chat.pieces import Answer, Piece
from pagemill.producer.wire.chat.thinking import ThinkingSplitter


class ChatParser:
    """Splits one sample's text, in any chunks, into reasoning, content and tool calls. Never raises."""

    def __init__(self, syntax: ChatSyntax) -> None:
        self._harmony: HarmonyParser | None = None
        if HARMONY in (syntax.thinking, syntax.tools):
            self._harmony = HarmonyParser(is_open=syntax.is_open, has_tools=syntax.tools is not None)
        tags = THINKING.get(syntax.thinking or "")
        self._thinking = None if tags is None else ThinkingSplitter(tags, is_open=syntax.is_open)
        tools = find_tools(syntax.tools)
        self._calls: CallFinder | ElementFinder | None = None
        if tools is not None:
            is_json = tools.elements is None and not tools.quote
            self._calls = CallFinder(tools) if is_json else ElementFinder(tools, dict(syntax.values))

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the text adds."""
        if self._harmony is not None:
            return self._harmony.feed(text)
        if self._thinking is None:
            return self._found(text)
        reasoning, rest = self._thinking.feed(text)
        return [*_reasoning(reasoning), *self._found(rest)]

    def finish(self) -> list[Piece]:
        """Return the text that was held back until the end."""
        if self._harmony is not None:
            return self._harmony.finish()
        pieces: list[Piece] = []
        if self._thinking is not None:
            reasoning, rest = self._thinking.finish()
            pieces += [*_reasoning(reasoning), *self._found(rest)]
        return pieces if self._calls is None else pieces + self._calls.finish()

    def _found(self, text: str) -> list[Piece]:
        if not text:
            return []
        return [Piece("content", text)] if self._calls is None else self._calls.feed(text)


def parse_whole(syntax: ChatSyntax, text: str) -> Answer:
    """Return the parts of a complete text."""
    parser, answer = ChatParser(syntax), Answer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer


def _reasoning(text: str) -> list[Piece]:
    return [Piece("reasoning", text)] if text else []
