"""Rewrites the numbers of a JSON schema that llguidance (1.9) would not enforce.

It uses numbers as 64-bit floats, which rounds most integers beyond 2**53, and rejects bounds beyond 2**63. Between two
bounds with the same integer part it includes the one nearer to zero, exclusive or not.
"""

from __future__ import annotations

import json
import math
import re
from decimal import Decimal
from typing import Any, TypeGuard

_MAY_DIFFER = re.compile(r"exclusiveM|[0-9]{16}|[0-9][eE]\+?[0-9]{2}")
_SIDES = (("minimum", "exclusiveMinimum", math.inf), ("maximum", "exclusiveMaximum", -math.inf))
_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_DATA = frozenset({"default", "examples"})
_FARTHEST = 2**63 - 1024
"""The largest bound that is supported; a farther one, which hardly excludes anything, becomes this one."""
_LARGEST = 1e9
"""Exclusive bounds beyond it remain: a step of 1e-14 of them could be as large as the distance of two bounds."""
_DIGITS = 14


class InexactInteger(ValueError):
    """A schema has an integer that a grammar cannot enforce."""


def with_exact_numbers(text: str) -> str:
    """Return a schema whose numbers a grammar enforces; it never allows more than the original.

    Args:
        text: a JSON schema; anything else is returned unchanged.

    Raises:
        InexactInteger: an integer beyond 2**53 that a grammar cannot enforce.
    """
    if not _MAY_DIFFER.search(text):
        return text
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    exact = exact_numbers(schema)
    return text if exact == schema else json.dumps(exact, ensure_ascii=False)


def exact_numbers(schema: Any) -> Any:
    """Do the same as `with_exact_numbers` with a parsed schema."""
    if isinstance(schema, list):
        return [exact_numbers(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    exact: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            exact[key] = {name: exact_numbers(part) for name, part in value.items()}
        elif key in ("enum", "const"):
            _check_integers(value)
            exact[key] = value
        else:
            exact[key] = value if key in _DATA else exact_numbers(value)
    for inclusive, exclusive, inwards in _SIDES:
        for key in (inclusive, exclusive):
            if _is_number(exact.get(key)):
                exact[key] = _representable(exact[key], inwards)
    _check_range(schema, exact)
    if exact.get("type") != "integer":
        _include(exact)
    return exact


def _is_number(value: Any) -> TypeGuard[float]:
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_finite and not isinstance(value, bool)


def _check_integers(value: Any) -> None:
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            _check_integers(part)
    elif isinstance(value, int) and not _is_representable(value):
        raise _refusal(value)


def _is_representable(value: int) -> bool:
    try:
        return float(value) == value
    except OverflowError:
        return False


def _refusal(value: int) -> InexactInteger:
    return InexactInteger(
        f"the integer {str(value)[:40]} in the schema is beyond 2**53, and a grammar cannot enforce it; use a string"
    )


def _representable(bound: int | float, inwards: float) -> int | float:
    """Return the nearest bound, in the direction of `inwards`, that is supported."""
    if bound < -_FARTHEST if inwards > 0 else bound > _FARTHEST:
        return -_FARTHEST if inwards > 0 else _FARTHEST
    if isinstance(bound, float) or abs(bound) > _FARTHEST or _is_representable(bound):
        return bound
    near = float(bound)
    is_outside = near < bound if inwards > 0 else near > bound
    return int(math.nextafter(near, inwards) if is_outside else near)


def _check_range(schema: dict[str, Any], exact: dict[str, Any]) -> None:
    """Reject a range that is empty only because its bounds were moved."""
    bounds = [exact.get(key) for key in ("minimum", "maximum")]
    low, high = (bound if _is_number(bound) else None for bound in bounds)
    if low is not None and high is not None and low > high and schema["minimum"] <= schema["maximum"]:
        raise _refusal(int(schema["minimum"]))


def _include(exact: dict[str, Any]) -> None:
    """Replace an exclusive integral bound by an inclusive one next to it, if the grammar would include it."""
    numbers: dict[str, float] = {key: value for key, value in exact.items() if _is_number(value)}
    for (inclusive, exclusive, inwards), opposite in zip(_SIDES, reversed(_SIDES), strict=True):
        bound, sign = numbers.get(exclusive), 1 if inwards > 0 else -1
        others = [numbers[key] for key in opposite[:2] if key in numbers]
        if bound is None or bound != int(bound) or not 0 <= bound * sign <= _LARGEST:
            continue
        if all((other - bound) * sign >= 1 for other in others):  # also without any
            continue
        place = Decimal(max(abs(int(bound)), 1)).adjusted() - _DIGITS
        nearest = float(Decimal(int(bound)) + sign * Decimal(1).scaleb(place))
        del exact[exclusive]
        exact[inclusive] = sign * max(sign * nearest, sign * numbers.get(inclusive, nearest))
