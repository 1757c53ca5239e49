"""OpenAI's `response_format` as what a job calls `structured_outputs`."""

from __future__ import annotations

from typing import Any

from pagemill.common.structured_outputs import is_model


def structure_of(response_format: Any) -> dict[str, Any] | None:
    """Convert OpenAI's response_format, or a pydantic class as its clients take, to structured_outputs."""
    if is_model(response_format):
        return {"json": response_format}
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json": '{"type":"object"}'}
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return {"json": schema}
    raise ValueError(
        "response_format must have type text, json_object or json_schema (with json_schema.schema)"
    )
