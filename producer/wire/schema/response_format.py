"""Conversion of OpenAI's `response_format` to a job's `structured_outputs`."""

from __future__ import annotations

from typing import Any

from pagemill.common.structured_outputs import is_model


def structure_of(response_format: Any) -> dict[str, Any] | None:
    """Convert OpenAI's response_format, or a pydantic class as its clients accept, to structured_outputs."""
    if is_model(response_format):
        return {"json": response_format}
    match response_format:
        case {"type": "text", **rest} if not _known(rest):
            return None
        case {"type": "json_object", **rest}:
            # `schema` is used by llama.cpp and SGLang.
            schema = _known(rest, "schema").get("schema")
            return {"json": '{"type":"object"}' if schema is None else _schema(schema)}
        case {"type": "json_schema", "json_schema": {"schema": schema, **more}, **rest} if not _known(rest):
            _known(more, "name", "description", "strict", place="response_format.json_schema")
            return {"json": _schema(schema)}
    raise ValueError(
        "response_format must have type text, json_object or json_schema (with json_schema.schema)"
    )


def _known(members: dict[Any, Any], *names: str, place: str = "response_format") -> dict[str, Any]:
    """Return the members that are not null. Raises ValueError for unknown ones."""
    given = {name: value for name, value in members.items() if value is not None}
    for name in sorted(given.keys() - set(names)):
        raise ValueError(f"{place}.{name[:64]} is not supported")
    return given


def _schema(schema: Any) -> dict[str, Any] | bool:
    if isinstance(schema, dict | bool):
        return schema
    raise ValueError("response_format: a schema is an object, true or false")
