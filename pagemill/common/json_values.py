"""Untrusted JSON: checks that it can be stored, forwarded and read back."""

from __future__ import annotations

import json
import math
from typing import Any

MAX_PARSED_DEPTH = 128


class NestedTooDeep(ValueError):
    """Arrays and objects are nested too deeply."""


def check_json(value: Any, depth: int) -> None:
    """Raise ValueError unless `value` is plain JSON: str names, finite numbers, no lone surrogates.

    Args:
        depth: the maximum nesting of arrays and objects. NestedTooDeep is raised beyond it.
    """
    match value:
        case None | bool() | int():
            return
        case float():
            if not math.isfinite(value):
                raise ValueError("numbers must be finite")
        case str():
            if not is_unicode(value):
                raise ValueError("strings must not hold lone surrogates")
        case list() | tuple() | dict():
            if depth == 0:
                raise NestedTooDeep("nested too deep")
            if isinstance(value, dict):
                if not all(isinstance(name, str) and is_unicode(name) for name in value):
                    raise ValueError("names must be strings")
                value = value.values()
            for item in value:
                check_json(item, depth - 1)
        case _:
            raise ValueError(f"{type(value).__name__} is not JSON")


def is_unicode(text: str) -> bool:
    """Return whether a string can be encoded as UTF-8: it has no lone surrogates."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def parse_output(text: str) -> Any:
    """Parse a generated text as JSON; None if it is invalid or cannot be forwarded as JSON."""
    try:
        value = json.loads(text)
        check_json(value, MAX_PARSED_DEPTH)
    except (ValueError, RecursionError):
        return None
    return value
