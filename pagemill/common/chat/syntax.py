"""The syntax of one job's output: reasoning tags and tool calls to parse."""

from __future__ import annotations

import json
from dataclasses import dataclass

from pagemill.common.chat.families import find_tools
from pagemill.common.chat.thinking import THINKING


@dataclass(frozen=True, slots=True)
class ChatSyntax:
    """The syntax to parse in a sample's text. Written as `thinking/tools`, each a name or nothing."""

    thinking: str | None = None
    """A name in THINKING."""
    is_open: bool = False
    """True if the prompt has opened the reasoning. Written as `+` after the name."""
    tools: str | None = None
    """A name in TOOLS, or of another package's syntax."""

    values: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """By function, the parameters whose values are not texts, for a syntax that does not mark them.

    Written after another `/`.
    """

    def __str__(self) -> str:
        values = f"/{json.dumps(dict(self.values), separators=(',', ':'))}" if self.values else ""
        return f"{self.thinking or ''}{'+' if self.is_open else ''}/{self.tools or ''}{values}"

    @classmethod
    def read(cls, text: str) -> ChatSyntax:
        """Return the syntax that `str` wrote; unknown names from a later version are omitted."""
        thinking, _, rest = text.partition("/")
        tools, _, values = rest.partition("/")
        name = thinking.removesuffix("+")
        return cls(
            thinking=name if name in THINKING else None,
            is_open=thinking.endswith("+"),
            tools=tools if find_tools(tools) is not None else None,
            values=_read_values(values),
        )


def _read_values(text: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    try:
        read = json.loads(text or "{}")
        return tuple((str(name), tuple(map(str, keys))) for name, keys in read.items())
    except (ValueError, RecursionError, AttributeError, TypeError):  # of a later version
        return ()
