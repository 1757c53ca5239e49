"""The parser of one sample's text, by the syntax that the worker has noted."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.chat.calls import CallFinder
from pagemill.chat.families import TOOLS
from pagemill.chat.pieces import Answer, Piece
from pagemill.chat.thinking import THINKING, ThinkingSplitter


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """The syntax to parse in a sample's text. Written as `thinking/tools`, each a name or nothing."""

    thinking: str | None = None
    """A name in THINKING."""
    is_open: bool = False
    """True if the prompt has opened the thinking. Written as `+` after the name."""
    tools: str | None = None
    """A name in TOOLS."""

    def __str__(self) -> str:
        return f"{self.thinking or ''}{'+' if self.is_open else ''}/{self.tools or ''}"

    @classmethod
    def read(cls, text: str) -> ChatSyntax:
        """Return the syntax that `str` wrote; names from a later version, unknown here, are left out."""
        thinking, _, tools = text.partition("/")
        name = thinking.removesuffix("+")
        return cls(
            thinking=name if name in THINKING else None,
            is_open=thinking.endswith("+"),
            tools=tools if tools in TOOLS else None,
        )


class ChatParser:
    """Splits one sample's text, in any chunks, into reasoning, content and tool calls. Never raises."""

    def __init__(self, syntax: ChatSyntax) -> None:
        tags = THINKING.get(syntax.thinking or "")
        self._thinking = None if tags is None else ThinkingSplitter(tags, is_open=syntax.is_open)
        self._calls = None if syntax.tools is None else CallFinder(TOOLS[syntax.tools])

    def feed(self, text: str) -> list[Piece]:
        """Return the pieces that the text adds."""
        if self._thinking is None:
            return self._found(text)
        reasoning, rest = self._thinking.feed(text)
        return [*_reasoning(reasoning), *self._found(rest)]

    def finish(self) -> list[Piece]:
        """Return what was held back until the end of the text."""
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
    """Return the parts of a whole text."""
    parser, answer = ChatParser(syntax), Answer()
    answer.add(parser.feed(text))
    answer.add(parser.finish())
    return answer


def _reasoning(text: str) -> list[Piece]:
    return [Piece("reasoning", text)] if text else []
