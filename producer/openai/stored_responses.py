"""The stored parts of a response's request, and the reconstruction of the request.

The job contains input, instructions and tools (`keep_input`), its metadata the rest, so a response has no separate key
in Redis and disappears with its job.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pagemill.producer.openai.responses import read_response
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output

_MARK = "response"
_IN_JOB = frozenset({"input", "instructions", "tools", "stream"})
_SCHEMA_TEXT = "schema_text"
"""The JSON schema of a request with a forced call, whose job has no schema of an answer."""


def metadata_of(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the job's metadata for a request for a response."""
    kept = {name: value for name, value in asked.items() if name not in _IN_JOB and value is not None}
    kept["has_instructions"] = asked.get("instructions") is not None
    match kept.get("text"):
        case {"format": {"schema": schema, **form}, **rest}:  # metadata cannot be nested as deep as a schema
            if asked.get("tool_choice") not in (None, "none", "auto"):
                form[_SCHEMA_TEXT] = json.dumps(schema)
            kept["text"] = {**rest, "format": form}
    return {_MARK: kept}


def request_of(job: Job, metadata: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the request, without its input, for a job and its metadata; None if it is not a response's job."""
    kept = (metadata or {}).get(_MARK)
    if not isinstance(kept, Mapping) or not job.messages:
        return None
    asked = {name: value for name, value in kept.items() if name != "has_instructions"}
    if kept.get("has_instructions"):
        asked["instructions"] = job.messages[0].text
    if job.tools:
        asked["tools"] = [
            {"type": "function", **tool.function.model_dump(exclude_none=True)} for tool in job.tools
        ]
    match asked.get("text"):
        case {"format": {"type": "json_schema"} as form, **rest} if "schema" not in form:
            shape = job.structured_outputs.json if job.structured_outputs is not None else None
            shape = form.get(_SCHEMA_TEXT, shape)
            try:
                schema = json.loads(shape) if isinstance(shape, str) else shape
            except (ValueError, RecursionError):
                return None
            form = {name: value for name, value in form.items() if name != _SCHEMA_TEXT}
            asked["text"] = {**rest, "format": {**form, "schema": schema}}
    try:
        read_response({**asked, "input": "-"})  # any producer may write such metadata
    except InvalidJob:
        return None
    return asked


def conversation(job: Job, asked: Mapping[str, Any], output: Output) -> list[dict[str, Any]]:
    """Return the messages of a finished response, with its output, for a response that continues it.

    As in the API, the instructions of the earlier response are left out.
    """
    history = list(job.messages or ())[1 if "instructions" in asked else 0 :]
    messages = [message.model_dump(mode="json", exclude_none=True) for message in history]
    answer: dict[str, Any] = {"role": "assistant", "content": output.text}
    if output.reasoning is not None:
        answer["reasoning"] = output.reasoning
    if output.tool_calls:
        answer["tool_calls"] = [call.message_dict() for call in output.tool_calls]
    return [*messages, answer]
