"""Messages between the engine and a schema's process."""

from __future__ import annotations

from typing import NamedTuple


class Advance(NamedTuple):
    """Move an output past its `start` tokens, if given, and accept one more token. Neither: discard the output."""

    number: int
    token: int | None = None
    start: list[int] | None = None


class Answer(NamedTuple):
    """The allowed tokens after an output's tokens or, without a number, the result of compiling the schema."""

    number: int | None
    num_bytes: int = 0
    """The process's memory."""
    seconds: float = 0.0
    """CPU time of the reply, including `replayed_s`."""
    is_complete: bool = False
    forced: list[int] | None = None
    error: tuple[str, str] | None = None
    """Code and message."""
    mask: bytes = b""
    replayed_s: float = 0.0
    """Time to move the output past its `start` tokens."""
    warnings: list[str] | None = None
    """Warnings about a schema's outputs."""
