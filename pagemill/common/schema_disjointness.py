"""Checks whether JSON schemas are disjoint, so that `oneOf` of them is equivalent to `anyOf`."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import combinations
from typing import Any

_ALL_TYPES = frozenset({"null", "boolean", "object", "array", "string", "number"})
_MAX_DEPTH = 8


class Disjointness:
    """Compares schemas of one document. False negatives are allowed: "not disjoint" may mean "not known"."""

    def __init__(self, target: Callable[[Any], Any], max_comparisons: int) -> None:
        """`target` returns the schema of a reference, or None."""
        self._target = target
        self._comparisons_left = max_comparisons

    def of_all(self, schemas: Sequence[Any]) -> bool:
        """Return True if each two of the schemas are disjoint."""
        return all(self.of(first, second) for first, second in combinations(schemas, 2))

    def of(self, first: Any, second: Any, depth: int = 0) -> bool:
        """Return True if no value can match both."""
        self._comparisons_left -= 1
        if self._comparisons_left < 0 or depth > _MAX_DEPTH:
            return False
        if first is False or second is False:
            return True
        ones, others = self._parts(first), self._parts(second)
        types = _types(ones) & _types(others)
        if not types:
            return True
        if self._have_no_common_value(ones, others):
            return True
        if types == {"object"} and self._have_disjoint_properties(ones, others, depth):
            return True
        return self._has_disjoint_choices(ones, second, depth) or self._has_disjoint_choices(
            others, first, depth
        )

    def _parts(self, schema: Any, depth: int = 0) -> list[dict[str, Any]]:
        """Return schemas that match all values of this one, including itself."""
        if not isinstance(schema, dict) or depth > _MAX_DEPTH:
            return []
        parts = [schema]
        if isinstance(several := schema.get("allOf"), list):
            for part in several:
                parts += self._parts(part, depth + 1)
        if "$ref" in schema:
            parts += self._parts(self._target(schema["$ref"]), depth + 1)
        return parts

    def _have_no_common_value(self, ones: list[dict[str, Any]], others: list[dict[str, Any]]) -> bool:
        return any(
            not ({_key(value) for value in mine} & {_key(value) for value in theirs})
            for mine in map(finite_values, ones)
            if mine is not None
            for theirs in map(finite_values, others)
            if theirs is not None
        )

    def _have_disjoint_properties(
        self, ones: list[dict[str, Any]], others: list[dict[str, Any]], depth: int
    ) -> bool:
        required = {
            name for part in (*ones, *others) for name in _list(part, "required") if isinstance(name, str)
        }
        return any(
            self.of(mine, theirs, depth + 1)
            for name in sorted(required)
            for mine in _property(ones, name)
            for theirs in _property(others, name)
        )

    def _has_disjoint_choices(self, parts: list[dict[str, Any]], other: Any, depth: int) -> bool:
        return any(
            all(self.of(choice, other, depth + 1) for choice in choices)
            for part in parts
            for key in ("anyOf", "oneOf")
            if (choices := _list(part, key))
        )


def finite_values(schema: Any) -> list[Any] | None:
    """Return all values that a schema's own `const`, `enum` or type allows, or None if they are not finite."""
    if not isinstance(schema, dict):
        return None
    if "const" in schema:
        return [schema["const"]]
    if isinstance(values := schema.get("enum"), list):
        return values
    few: dict[str, list[Any]] = {"boolean": [False, True], "null": [None]}
    return few.get(str(schema.get("type")))


def _types(parts: list[dict[str, Any]]) -> frozenset[str]:
    types = _ALL_TYPES
    for part in parts:
        if isinstance(named := part.get("type"), str | list):
            names = [named] if isinstance(named, str) else named
            types &= {"number" if name == "integer" else str(name) for name in names}
        if (values := finite_values(part)) is not None:
            types &= {_type_of(value) for value in values}
    return types


def _property(parts: list[dict[str, Any]], name: str) -> list[Any]:
    """Return schemas that match the value of a property."""
    found: list[Any] = []
    for part in parts:
        properties = part.get("properties")
        if isinstance(properties, dict) and name in properties:
            found.append(properties[name])
        elif part.get("additionalProperties") is False and not part.get("patternProperties"):
            found.append(False)
    return found or [True]


def _type_of(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    kinds = {str: "string", int: "number", float: "number", list: "array", dict: "object"}
    return kinds.get(type(value), "null")


def _key(value: Any) -> str:
    """Return a text that equal values share: 1 and 1.0 are the same number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(value, list | dict):
        return type(value).__name__  # numbers inside may be spelled differently: all lists count as equal
    return json.dumps(value)


def _list(schema: dict[str, Any], key: str) -> list[Any]:
    value = schema.get(key)
    return value if isinstance(value, list) else []
