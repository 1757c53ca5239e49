"""The gateway's own description, OpenAPI 3.1, from the same fields and limits that requests are judged by."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from pagemill.producer.gateway.request_parsing import TIMEOUT_HEADER
from pagemill.producer.openai.formats import ANNOTATIONS, CHAT_URL, COMPLETIONS_URL, FIELDS, NEUTRAL, URLS
from pagemill.producer.wire.schema.job import Job

_REF = "#/components/schemas/"
_STRING: dict[str, Any] = {"type": "string"}
_INTEGER: dict[str, Any] = {"type": "integer"}
_METADATA: dict[str, Any] = {"type": ["object", "null"], "additionalProperties": _STRING}
_EXPIRY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "anchor": {"enum": ["created_at"]},
        "seconds": {"type": "integer", "minimum": 3600, "maximum": 2_592_000},
    },
    "required": ["anchor", "seconds"],
}


@cache
def description() -> dict[str, Any]:
    """The whole document."""
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagemill gateway",
            "version": _version(),
            "description": "OpenAI's interface in front of a Pagemill queue.",
        },
        "security": [{"key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": _schemas(),
        },
    }


def _version() -> str:
    try:
        return version("pagemill")
    except PackageNotFoundError:
        return "0"


def _paths() -> dict[str, Any]:
    headers = [
        _parameter(TIMEOUT_HEADER, "header", {"type": "number", "exclusiveMinimum": 0}),
        _parameter("idempotency-key", "header", {"type": "string", "minLength": 1, "maxLength": 251}),
    ]
    file_id = _path_parameter("file_id", "file-[0-9a-f]{24}")
    batch_id = _path_parameter("batch_id", "batch_[0-9a-f]{24}")
    return {
        CHAT_URL: {"post": _operation("ChatRequest", "ChatCompletion", parameters=headers, stream=True)},
        COMPLETIONS_URL: {
            "post": _operation("CompletionRequest", "Completion", parameters=headers, stream=True)
        },
        "/v1/models": {"get": _operation(None, "ModelList")},
        "/v1/models/{model}": {"get": _operation(None, "Model", parameters=[_path_parameter("model")])},
        "/v1/files": {
            "get": _operation(None, "FileList", parameters=[*_paging(10_000), *_file_filters()]),
            "post": _operation("FileUpload", "File", kind="multipart/form-data"),
        },
        "/v1/files/{file_id}": {
            "get": _operation(None, "File", parameters=[file_id]),
            "delete": _operation(None, "DeletedFile", parameters=[file_id]),
        },
        "/v1/files/{file_id}/content": {"get": _content_operation(file_id)},
        "/v1/batches": {
            "get": _operation(None, "BatchList", parameters=_paging(100)),
            "post": _operation("BatchRequest", "Batch"),
        },
        "/v1/batches/{batch_id}": {"get": _operation(None, "Batch", parameters=[batch_id])},
        "/v1/batches/{batch_id}/cancel": {"post": _operation(None, "Batch", parameters=[batch_id])},
    }


def _operation(
    body: str | None,
    answer: str,
    *,
    parameters: list[dict[str, Any]] | None = None,
    stream: bool = False,
    kind: str = "application/json",
) -> dict[str, Any]:
    content: dict[str, Any] = {"application/json": {"schema": _ref(answer)}}
    if stream:
        content["text/event-stream"] = {"schema": _STRING}
    operation: dict[str, Any] = {
        "parameters": parameters or [],
        "responses": {"200": {"description": "Done.", "content": content}, "default": _error()},
    }
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {kind: {"schema": _ref(body)}}}
    return operation


def _content_operation(file_id: dict[str, Any]) -> dict[str, Any]:
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    return {
        "parameters": [file_id],
        "responses": {"200": {"description": "The bytes.", "content": content}, "default": _error()},
    }


def _error() -> dict[str, Any]:
    content = {"application/json": {"schema": _ref("Error")}}
    return {"description": "What is wrong, or too much.", "content": content}


def _ref(name: str) -> dict[str, Any]:
    return {"$ref": _REF + name}


def _parameter(name: str, place: str, schema: dict[str, Any]) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": schema}


def _path_parameter(name: str, pattern: str = "[A-Za-z0-9._@:/+-]{1,128}") -> dict[str, Any]:
    return _parameter(name, "path", {"type": "string", "pattern": f"^{pattern}$"})


def _paging(most: int) -> list[dict[str, Any]]:
    return [
        _parameter("limit", "query", {"type": "integer", "minimum": 1, "maximum": most}),
        _parameter("after", "query", _STRING),
    ]


def _file_filters() -> list[dict[str, Any]]:
    return [
        _parameter("order", "query", {"type": "string", "enum": ["asc", "desc"]}),
        _parameter("purpose", "query", _STRING),
    ]


def _schemas() -> dict[str, Any]:
    job = Job.model_json_schema(ref_template=_REF + "{model}")
    message = {
        "type": "object",
        "properties": {
            "role": {"enum": ["system", "developer", "user", "assistant", "tool"]},
            "content": {"type": ["string", "array"], "items": {"type": "object"}},
        },
        "required": ["role", "content"],
    }
    chat = {
        "messages": {"type": "array", "minItems": 1, "maxItems": 1024, "items": message},
        "max_completion_tokens": {"type": "integer", "minimum": 1},
        "logprobs": {"type": "boolean"},
        "top_logprobs": {"type": "integer", "minimum": 0, "maximum": 20},
    }
    numbers = {"type": "array", "items": _INTEGER}
    prompts = {"type": "array", "minItems": 1, "maxItems": 128, "items": {"anyOf": [_STRING, numbers]}}
    completion = {"prompt": {"anyOf": [_STRING, numbers, prompts]}}
    usage = _ref("Usage")
    return {
        "StructuredOutputs": job["$defs"]["StructuredOutputs"],
        "ChatRequest": _request(job, CHAT_URL, chat, "messages"),
        "CompletionRequest": _request(job, COMPLETIONS_URL, completion, "prompt"),
        "ChatCompletion": _completion("chat.completion", {"message": {"type": "object"}}, usage),
        "Completion": _completion("text_completion", {"text": _STRING}, usage),
        "Usage": _answer(
            prompt_tokens=_INTEGER,
            completion_tokens=_INTEGER,
            total_tokens=_INTEGER,
            prompt_tokens_details={"type": "object"},
        ),
        "BatchRequest": _batch_request(),
        "FileUpload": _file_upload(),
        **_objects(),
        "Error": _answer(error=_answer(message=_STRING, type=_STRING, param=_or_null(), code=_or_null())),
    }


def _objects() -> dict[str, Any]:
    """What is listed, and the lists."""
    rows = {
        "Model": _answer(object={"const": "model"}, id=_STRING, created=_INTEGER, owned_by=_STRING),
        "File": _answer(
            object={"const": "file"},
            id=_STRING,
            bytes=_INTEGER,
            created_at=_INTEGER,
            expires_at=_INTEGER,
            filename=_STRING,
            purpose=_STRING,
            status=_STRING,
        ),
        "Batch": _answer(
            object={"const": "batch"},
            id=_STRING,
            status=_STRING,
            endpoint=_STRING,
            input_file_id=_STRING,
            completion_window=_STRING,
            created_at=_INTEGER,
            expires_at=_INTEGER,
            request_counts={"type": "object"},
        ),
    }
    lists = {
        f"{name}List": _answer(object={"const": "list"}, data={"type": "array", "items": _ref(name)})
        for name in rows
    }
    deleted = _answer(object={"const": "file"}, id=_STRING, deleted={"const": True})
    return rows | lists | {"DeletedFile": deleted}


def _request(job: dict[str, Any], url: str, own: dict[str, Any], required: str) -> dict[str, Any]:
    """A request for completions. Null is as good as nothing, in any field."""
    sampling = {
        name: {key: value for key, value in schema.items() if key not in ("default", "title", "description")}
        for name, schema in job["properties"].items()
        if name in FIELDS[url] and name not in ("model", *own)
    }
    texts = dict.fromkeys(ANNOTATIONS, _STRING)
    neutral = {name: {"enum": list(values)} for name, values in NEUTRAL.items()}
    structure = {"type": "object", "properties": {"type": _STRING}, "required": ["type"]}
    options = {"type": "object", "properties": {"include_usage": {"type": ["boolean", "null"]}}}
    optional = {
        **sampling, **own, **texts, **neutral,
        "response_format": structure, "stream": {"type": "boolean"}, "stream_options": options,
        "metadata": _METADATA,
    }  # fmt: skip
    return {
        "type": "object",
        "properties": {
            **{name: {"anyOf": [schema, {"type": "null"}]} for name, schema in optional.items()},
            "model": job["properties"]["model"],
            required: own[required],
        },
        "required": ["model", required],
        "additionalProperties": {"type": "null"},
    }


def _completion(kind: str, own: dict[str, Any], usage: dict[str, Any]) -> dict[str, Any]:
    choice = _answer(index=_INTEGER, finish_reason={"enum": ["stop", "length"]}, **own)
    return _answer(
        object={"const": kind},
        id=_STRING,
        created=_INTEGER,
        model=_STRING,
        choices={"type": "array", "minItems": 1, "items": choice},
        usage=usage,
    )


def _batch_request() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "input_file_id": {"type": "string", "pattern": "^file-[0-9a-f]{24}$"},
            "endpoint": {"enum": list(URLS)},
            "completion_window": {"type": "string", "pattern": "^[1-9][0-9]{0,2}h$"},
            "metadata": _METADATA,
            "output_expires_after": {"anyOf": [_EXPIRY, {"type": "null"}]},
        },
        "required": ["input_file_id", "endpoint", "completion_window"],
        "additionalProperties": False,
    }


def _file_upload() -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {
            "file": {"type": "string", "format": "binary", "minLength": 1},
            "purpose": {"enum": ["batch"]},
        },
        "required": ["file", "purpose"],
    }


def _answer(**properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has all of these, and maybe more."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _or_null() -> dict[str, Any]:
    return {"type": ["string", "null"]}
