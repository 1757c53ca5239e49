"""Messages between the engine and a schema's process."""

from __future__ import annotations

from typing import NamedTuple


class Advance(NamedTuple):
    """Place an output after its `start` tokens, if given, and take one more. Neither: forget the output."""

    number: int
    token: int | None = None
    start: list[int] | None = None


class Answer(NamedTuple):
    """What follows an output's tokens or, with no number, what became of the schema."""

    number: int | None
    num_bytes: int = 0
    """The process's memory."""
    seconds: float = 0.0
    """CPU time of the answer, including `replayed_s`."""
    is_complete: bool = False
    forced: list[int] | None = None
    error: tuple[str, str] | None = None
    """Code and message."""
    mask: bytes = b""
    replayed_s: float = 0.0
    """Time to place the output after its `start` tokens."""
    warnings: list[str] | None = None
    """Of a schema: what users should know of its outputs."""
