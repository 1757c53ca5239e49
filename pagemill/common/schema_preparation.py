"""Prepares JSON schemas for llguidance (1.9), so that a grammar enforces their numbers."""

from __future__ import annotations

import json
from typing import Any

from pagemill.common.schema_numbers import check_integers, exact_bounds

_MAPS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas", "dependencies"}
)
_DATA = frozenset({"default", "examples"})


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
            exact[key] = {name: prepared_schema(part) for name, part in value.items()}
        elif key in ("enum", "const"):
            check_integers(value)
            exact[key] = value
        else:
            exact[key] = value if key in _DATA else prepared_schema(value)
    exact_bounds(exact)
    return exact
