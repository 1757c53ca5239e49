"""The turns of a chat for gpt-oss's chat template, which writes one call per message, and one text before it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

_PREAMBLE = "<|end|><|start|>assistant<|channel|>commentary<|message|>"
"""Separator between the reasoning and a text for the user that precedes a call."""


def harmony_turns(turns: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one turn per call, each followed by its results.

    The template names a result after the preceding call and drops further calls of a turn. As the format requires, the
    template keeps the reasoning before calls until an answer follows.
    """
    arranged: list[dict[str, Any]] = []
    at = 0
    while at < len(turns):
        turn, at = turns[at], at + 1
        calls = turn.get("tool_calls") or ()
        if not calls:
            arranged.append(turn)
            continue
        results = []
        while at < len(turns) and turns[at]["role"] == "tool":
            results.append(turns[at])
            at += 1
        for number, call in enumerate(calls):
            arranged.append(
                {
                    **(_one_text(turn) if number == 0 else {"role": turn["role"], "content": ""}),
                    "tool_calls": [call],
                }
            )
            arranged += [one for one in results if one.get("tool_call_id") == call["id"]]
        known = {call["id"] for call in calls}
        arranged += [one for one in results if one.get("tool_call_id") not in known]
    return arranged


def _one_text(turn: dict[str, Any]) -> dict[str, Any]:
    """Join reasoning and content, of which the template accepts only one next to a call."""
    reasoning, content = turn.get("reasoning_content"), turn["content"]
    if not reasoning or not content:
        return turn
    joined = f"{reasoning}{_PREAMBLE}{content}"
    return turn | {"content": "", "reasoning": joined, "reasoning_content": joined}
