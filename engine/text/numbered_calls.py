"""Ids of calls in Kimi K2's format: its template writes them in place of the functions' names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def number_calls(turns: Sequence[dict[str, Any]]) -> None:
    """Rename all calls of a chat, and references to them, to `functions.NAME:NUMBER`, counted from 0."""
    names: dict[str, str] = {}
    number = 0
    for turn in turns:
        for call in turn.get("tool_calls", ()):
            name = f"functions.{call['function']['name']}:{number}"
            names[call["id"]], call["id"], number = name, name, number + 1
        if turn.get("tool_call_id") in names:
            turn["tool_call_id"] = names[turn["tool_call_id"]]
