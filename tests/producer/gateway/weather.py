"""A function that models call, and an echo prompt that reasons, answers and calls it twice."""

from __future__ import annotations

from typing import Any

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: Any = {"type": "function", "function": {"name": "weather", "parameters": PARAMETERS}}
FLAT: Any = {"type": "function", "name": "weather", "parameters": PARAMETERS}
"""In the form that /v1/responses accepts."""
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Rome"}}\n</tool_call>'
ANSWER = f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\n{CALL}"
BETWEEN = f"<think>\nWhere?\n</think>\n\nLet me look.\n{CALL}\nAnd there.\n{CALL}\nDone."
"""Text before, between and after calls."""
