"""Conversion of the scalars of numpy, torch and pandas, which strict fields reject, to Python's."""

from __future__ import annotations

from typing import Any

_PLAIN = frozenset({str, int, float, bool, type(None), bytes})
_MAX_DEPTH = 4
"""Maximum depth of lists and objects to convert; no field needs more."""


def with_plain_numbers(value: Any, depth: int = _MAX_DEPTH) -> Any:
    """Return a value with plain scalars and lists for those with a `dtype`; the same object if there are none."""
    kind = type(value)
    if kind in _PLAIN or not depth:
        return value
    if kind is dict:
        plain = {name: with_plain_numbers(item, depth - 1) for name, item in value.items()}
        return plain if any(plain[name] is not item for name, item in value.items()) else value
    if kind is list or kind is tuple:
        if _PLAIN.issuperset(map(type, value)):
            return value
        items = [with_plain_numbers(item, depth - 1) for item in value]
        return items if any(new is not old for new, old in zip(items, value, strict=True)) else value
    return value.tolist() if hasattr(value, "dtype") and callable(getattr(value, "tolist", None)) else value
