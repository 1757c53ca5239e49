"""The parts that a generated text falls into, and the answer they add up to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Piece:
    """A fragment of a sample: reasoning, content, or the arguments of a tool call."""

    kind: Literal["reasoning", "content", "call"]
    text: str
    number: int = 0
    """Which call, from 0."""
    name: str | None = None
    """The function's name, in a call's first fragment."""


@dataclass(slots=True)
class Call:
    """A tool call so far. `arguments` is JSON as the model wrote it: not checked, and cut where the output is."""

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


def held_back(text: str, marker: str) -> int:
    """Return the length of the longest end of `text` that is a proper beginning of `marker`."""
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if marker.startswith(text[-length:]):
            return length
    return 0
