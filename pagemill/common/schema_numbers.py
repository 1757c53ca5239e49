"""Rewrites the numbers of a JSON schema's object that llguidance (1.9) would not enforce.

It uses numbers as 64-bit floats, which rounds most integers beyond 2**53, and rejects bounds beyond 2**63. Between two
bounds with the same integer part it includes the one nearer to zero, exclusive or not.
"""

from __future__ import annotations

import math
from decimal import Decimal
from typing import Any, TypeGuard

SIDES = (("minimum", "exclusiveMinimum", math.inf), ("maximum", "exclusiveMaximum", -math.inf))
_FARTHEST = 2**63 - 1024
"""The largest bound that is supported; a farther one, which hardly excludes anything, becomes this one."""
_LARGEST = 1e9
"""Exclusive bounds beyond it remain: a step of 1e-14 of them could be as large as the distance of two bounds."""
_DIGITS = 14


class InexactInteger(ValueError):
    """A schema has an integer that a grammar cannot enforce."""


def exact_bounds(schema: dict[str, Any]) -> None:
    """Replace a schema's bounds by ones that a grammar enforces, which never allow more.

    Raises:
        InexactInteger: the bounds exclude each integer that a grammar can enforce.
    """
    given = dict(schema)
    for inclusive, exclusive, inwards in SIDES:
        for key in (inclusive, exclusive):
            if _is_number(schema.get(key)):
                schema[key] = _representable(schema[key], inwards)
    _check_range(given, schema)
    if schema.get("type") != "integer":
        _include(schema)


def _is_number(value: Any) -> TypeGuard[float]:
    is_finite = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
    return is_finite and not isinstance(value, bool)


def check_integers(value: Any) -> None:
    """Raise InexactInteger if a value has an integer beyond 2**53 that a grammar cannot enforce."""
    if isinstance(value, list | dict):
        for part in value.values() if isinstance(value, dict) else value:
            check_integers(part)
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
    for (inclusive, exclusive, inwards), opposite in zip(SIDES, reversed(SIDES), strict=True):
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
