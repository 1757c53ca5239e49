"""The fields of a JSON schema, as columns next to the output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagemill.producer.dataset.errors import DatasetError

NO_FIELDS = "columns for a schema's fields need a JSON schema of an object with properties"
SCALARS = ("string", "integer", "number", "boolean")


def schema_fields(text: str) -> dict[str, str]:
    """Return the top-level fields of an object's schema and their types; "" for one that is not a scalar.

    Raises DatasetError for a schema without fields.
    """
    schema = json.loads(text)
    schema = _resolved(schema, schema)
    properties = schema.get("properties") if isinstance(schema, dict) else None
    if not isinstance(properties, dict) or not properties:
        raise DatasetError(NO_FIELDS)
    return {name: _type(field) for name, field in properties.items()}


def field_values(output: Any, fields: Mapping[str, str]) -> dict[str, Any]:
    """Return the output's value of each field; None for missing ones."""
    values = output if isinstance(output, dict) else {}
    return {name: values.get(name) for name in fields}


def _resolved(schema: Any, root: Any) -> Any:
    """Resolve a reference to the root's own definitions, once."""
    reference = schema.get("$ref") if isinstance(schema, dict) else None
    if not isinstance(reference, str) or not reference.startswith("#/"):
        return schema
    for part in reference.removeprefix("#/").split("/"):
        root = root.get(part) if isinstance(root, dict) else None
    return root


def _type(field: Any) -> str:
    """Return the type of a scalar field, which may be null as well; "" for any other."""
    if not isinstance(field, dict):
        return ""
    for word in ("anyOf", "oneOf"):
        if isinstance(field.get(word), list):
            kinds = {_type(option) for option in field[word] if option != {"type": "null"}}
            return kinds.pop() if len(kinds) == 1 else ""
    given = field.get("type")
    names = [name for name in (given if isinstance(given, list) else [given]) if name != "null"]
    if names == [None]:
        values = field.get("enum") or [field.get("const")]
        return "string" if all(isinstance(value, str) for value in values) else ""
    return names[0] if len(names) == 1 and names[0] in SCALARS else ""
