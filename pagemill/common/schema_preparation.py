"""Prepares JSON schemas for llguidance (1.9) and the verifier: one dialect, and numbers that a grammar enforces.

OpenAPI 3.0, draft 4 and generators of schemas write some keywords in forms that JSON Schema 2020-12 does not have.
"""

from __future__ import annotations

import json
import re
from typing import Any
from urllib.parse import quote

from pagemill.common.schema_numbers import SIDES, check_integers, exact_bounds

_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_DATA = frozenset({"default", "examples"})
_COUNTS = frozenset(
    {f"{side}{name}" for side in ("min", "max") for name in ("Contains", "Items", "Length", "Properties")}
)
_COMBINED = frozenset({"$ref", "allOf", "anyOf", "oneOf", "not", "if", "const"})
_OUTER = frozenset({"$schema", "$id", "$defs", "definitions"})
_NOT_ESCAPE = re.compile("%(?![0-9A-Fa-f]{2})")
_IN_FRAGMENTS = "%/?:@!$&'()*+,;=-._~"
"""The characters of URI fragments; generators write others too, as in `Page[Item]`, which the library rejects."""
_CLASS = re.compile(r"\\.|\[\^?\]?(?:\[:[a-z]+:\]|\\.|[^\]\\])*\]", re.DOTALL)
_NAMED = re.compile(r"\\.|\[:([a-z]+):\]", re.DOTALL)
POSIX_CLASSES = {
    "alnum": "0-9A-Za-z", "alpha": "A-Za-z", "ascii": r"\x00-\x7F", "blank": r"\t ", "cntrl": r"\x00-\x1F\x7F",
    "digit": "0-9", "graph": "!-~", "lower": "a-z", "print": " -~", "punct": r"!-/:-@\[-`{-~", "space": r"\t-\r ",
    "upper": "A-Z", "word": "0-9A-Z_a-z", "xdigit": "0-9A-Fa-f",
}  # fmt: skip
"""The characters of POSIX classes, which only the grammar's regular expressions know."""


def prepared_text(text: str) -> str:
    """Return a schema that a grammar enforces; its numbers never allow more than those of the original.

    Args:
        text: a JSON schema; anything else is returned unchanged.

    Raises:
        InexactInteger: an integer beyond 2**53 that a grammar cannot enforce.
    """
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return json.dumps(prepared_schema(schema))


def prepared_schema(schema: Any) -> Any:
    """Do the same as `prepared_text` with a parsed schema."""
    if isinstance(schema, list):
        return [prepared_schema(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    exact: dict[str, Any] = {}
    for key, value in schema.items():
        if key in _MAPS and isinstance(value, dict):
            names = map(_without_named_classes, value) if key == "patternProperties" else value
            exact[key] = dict(zip(names, map(prepared_schema, value.values()), strict=True))
        elif key == "pattern" and isinstance(value, str):
            exact[key] = _without_named_classes(value)
        elif key == "$ref" and isinstance(value, str):
            address, sign, fragment = value.partition("#")
            exact[key] = (
                address + sign + quote(_NOT_ESCAPE.sub("%25", fragment), _IN_FRAGMENTS, errors="replace")
            )
        elif key in _COUNTS and isinstance(value, float) and value.is_integer():
            exact[key] = int(value)  # the library rejects 1.0
        elif key in ("enum", "const"):
            check_integers(value)
            exact[key] = value
        else:
            exact[key] = value if key in _DATA else prepared_schema(value)
    _modernize(exact)
    exact_bounds(exact)
    return _with_null(exact) if exact.get("nullable") is True else exact


def _modernize(schema: dict[str, Any]) -> None:
    """Replace boolean bounds of draft 4 and OpenAPI 3.0 in one object."""
    for inclusive, exclusive, _ in SIDES:
        if isinstance(schema.get(exclusive), bool) and schema.pop(exclusive) and inclusive in schema:
            schema[exclusive] = schema.pop(inclusive)


def _without_named_classes(pattern: str) -> str:
    """Replace `[[:alpha:]]` by `[A-Za-z]`, which Python reads alike."""
    return _CLASS.sub(
        lambda found: _NAMED.sub(lambda name: POSIX_CLASSES.get(name[1], name[0]), found[0]), pattern
    )


def _with_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Return a schema that also allows null, which OpenAPI 3.0 writes as `nullable`."""
    if _COMBINED & schema.keys():
        inner = {key: value for key, value in schema.items() if key not in _OUTER}
        outer = {key: value for key, value in schema.items() if key in _OUTER}
        return outer | {"anyOf": [inner, {"type": "null"}]}
    kinds, values = schema.get("type"), schema.get("enum")
    if isinstance(kinds, str | list):
        named = [kinds] if isinstance(kinds, str) else kinds
        schema["type"] = named if "null" in named else [*named, "null"]
    if isinstance(values, list) and None not in values:
        schema["enum"] = [*values, None]
    return schema
