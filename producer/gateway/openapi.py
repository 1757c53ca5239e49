"""The gateway's OpenAPI 3.1 description. pydantic makes the schemas from the models that check requests."""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, WithJsonSchema, create_model
from pydantic.json_schema import models_json_schema

from pagemill.common.installed import installed_version
from pagemill.producer.anthropic import messages
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.gateway.batches.batches import BATCH_ID, Batch, BatchRequest
from pagemill.producer.gateway.batches.files import FILE_ID, File
from pagemill.producer.gateway.request_parsing import ESTIMATE_HEADER, TIMEOUT_HEADER
from pagemill.producer.gateway.served_models import Model
from pagemill.producer.gateway.webhook_endpoints import HOOK_ID, WebhookEndpoint, WebhookRequest
from pagemill.producer.openai import formats, responses
from pagemill.producer.openai.pooled_schemas import POOLED_OPERATIONS
from pagemill.producer.openai.tokens import TOKEN_OPERATIONS
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import MAX_KEY, MAX_MESSAGES, Job
from pagemill.producer.wire.schema.text.chat import ToolCall

_REF = "#/components/schemas/"
_OPERATIONS = {**POOLED_OPERATIONS, **TOKEN_OPERATIONS}


class ChatMessage(BaseModel):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    name: Annotated[str, Field(min_length=1, max_length=128)] | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    reasoning: str | None = None


class ResponseFormat(BaseModel):
    model_config = ConfigDict(extra="allow")
    type: str


class StreamOptions(BaseModel):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, None]
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    metadata: dict[str, str] | None = None


class _ChatRequest(_Request):
    messages: Annotated[list[ChatMessage], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    store: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


_Prompts = Annotated[list[str | list[int]], Field(min_length=1, max_length=formats.MAX_PROMPTS)]


class _CompletionRequest(_Request):
    prompt: str | list[int] | _Prompts


class FileUpload(BaseModel):
    file: Annotated[bytes, Field(min_length=1)]
    purpose: Literal["batch"]


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, Any]
    completion_tokens_details: dict[str, Any] | None = None


class _Choice(BaseModel):
    index: int
    finish_reason: Literal["stop", "length", "tool_calls"]
    label: str | None = None
    label_probs: dict[str, float] | None = None


class ChatChoice(_Choice):
    message: dict[str, Any]


class CompletionChoice(_Choice):
    text: str


class _Answer(BaseModel):
    id: str
    created: int
    model: str
    usage: Usage


class ChatCompletion(_Answer):
    object: Literal["chat.completion"]
    choices: Annotated[list[ChatChoice], Field(min_length=1)]


class Completion(_Answer):
    object: Literal["text_completion"]
    choices: Annotated[list[CompletionChoice], Field(min_length=1)]


class ChatUpdate(BaseModel):
    model_config = ConfigDict(extra="forbid")
    metadata: dict[str, str] | None


class ChatMessages(BaseModel):
    object: Literal["list"]
    data: list[dict[str, Any]]
    has_more: bool


class DeletedWebhook(BaseModel):
    object: Literal["webhook_endpoint"]
    id: str
    deleted: Literal[True]


class ResponseRequest(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, None]
    model: Annotated[str, Field(pattern=f"^{keys.MODEL_PATTERN.pattern}$")]
    input: Annotated[str, Field(min_length=1)] | Annotated[list[dict[str, Any]], Field(min_length=1)]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    metadata: dict[str, str] | None = None
    stream: bool | None = None
    store: bool | None = None
    background: bool | None = None
    previous_response_id: str | None = None
    service_tier: Literal["auto", "default", "flex"] | None = None


class ResponseObject(BaseModel):
    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    model: str
    output: list[dict[str, Any]]
    error: dict[str, Any] | None
    usage: dict[str, Any] | None


class InputTokens(BaseModel):
    object: Literal["response.input_tokens"]
    input_tokens: int


class _Prompted(BaseModel):
    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, None]
    model: Annotated[str, Field(pattern=f"^{keys.MODEL_PATTERN.pattern}$")]
    messages: Annotated[list[dict[str, Any]], Field(min_length=1, max_length=MAX_MESSAGES)]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None


class MessageRequest(_Prompted):
    max_tokens: Annotated[int, Field(ge=1)]
    temperature: Annotated[float, Field(ge=0)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    stop_sequences: list[str] | None = None
    output_config: dict[str, Any] | None = None
    stream: bool | None = None


class MessageTokensRequest(_Prompted):
    pass


class MessageObject(BaseModel):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[dict[str, Any]]
    stop_reason: Literal["end_turn", "max_tokens", "tool_use"]
    usage: dict[str, Any]


class MessageTokens(BaseModel):
    input_tokens: int


class MessageError(BaseModel):
    type: Literal["error"]
    error: dict[str, str]


class DeletedResponse(BaseModel):
    object: Literal["response"]
    id: str
    deleted: Literal[True]


class DeletedChat(BaseModel):
    object: Literal["chat.completion.deleted"]
    id: str
    deleted: Literal[True]


class DeletedFile(BaseModel):
    object: Literal["file"]
    id: str
    deleted: Literal[True]


class ErrorBody(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class Error(BaseModel):
    error: ErrorBody


def _request(name: str, url: str, base: type[_Request]) -> type[BaseModel]:
    """Return a completion request's model: `base` with a job's fields, in any of which null means unset."""
    job = {field: info.rebuild_annotation() for field, info in Job.model_fields.items()}
    fields: dict[str, Any] = {field: job[field] for field in job if field in formats.FIELDS[url]}
    fields |= dict.fromkeys(formats.ANNOTATIONS, str)
    fields |= dict.fromkeys(formats.STRUCTURES, str)
    fields |= {"guided_json": dict[str, Any] | bool | str, "guided_choice": list[str]}
    for field, values in formats.NEUTRAL.items():
        if field in formats.FIELDS[url]:
            continue
        fields[field] = Annotated[Any, WithJsonSchema({"enum": list(values)})]
    optional: dict[str, Any] = {
        field: (kind | None, None) for field, kind in fields.items() if field not in base.model_fields
    }
    return create_model(name, __base__=base, **optional | {"model": (job["model"], ...)})


def _list_of(row: type[BaseModel]) -> type[BaseModel]:
    fields: dict[str, Any] = {"object": (Literal["list"], ...), "data": (list[row], ...)}  # type: ignore[valid-type]
    return create_model(f"{row.__name__}List", **fields)


ChatRequest = _request("ChatRequest", formats.CHAT_URL, _ChatRequest)
CompletionRequest = _request("CompletionRequest", formats.COMPLETIONS_URL, _CompletionRequest)
ModelList, FileList, BatchList = _list_of(Model), _list_of(File), _list_of(Batch)
ChatList, WebhookList = _list_of(ChatCompletion), _list_of(WebhookEndpoint)
_REFERRED_TO: tuple[type[BaseModel], ...] = (
    ChatRequest, CompletionRequest, ResponseRequest, BatchRequest, FileUpload, ChatCompletion, Completion,
    ResponseObject, InputTokens, ModelList, FileList, BatchList, DeletedFile, DeletedChat,
    WebhookRequest, WebhookEndpoint, WebhookList, DeletedWebhook, ChatList, ChatUpdate, ChatMessages, DeletedResponse,
    MessageRequest, MessageObject, MessageTokensRequest, MessageTokens, MessageError, Error,
    *(model for pair in _OPERATIONS.values() for model in pair),
)  # fmt: skip


@cache
def description() -> dict[str, Any]:
    """Return the complete document."""
    _, schemas = models_json_schema(
        [(model, "validation") for model in _REFERRED_TO], ref_template=_REF + "{model}"
    )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Pagemill gateway",
            "version": installed_version(),
            "description": "OpenAI's interface in front of a Pagemill queue.",
        },
        "security": [{"key": []}],
        "paths": _paths(),
        "components": {
            "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}},
            "schemas": schemas["$defs"],
        },
    }


def _paths() -> dict[str, Any]:
    headers = [
        _parameter(TIMEOUT_HEADER, "header", Annotated[float, Field(gt=0)]),
        _parameter(ESTIMATE_HEADER, "header", OnLate),
        _parameter("idempotency-key", "header", Annotated[str, Field(min_length=1, max_length=MAX_KEY - 4)]),
    ]
    model = [_parameter("model", "path", Job.model_fields["model"].rebuild_annotation())]
    response = [
        _parameter("response_id", "path", Annotated[str, Field(pattern=f"^resp_{keys.ID_PATTERN.pattern}$")])
    ]
    chat = [
        _parameter(
            "completion_id", "path", Annotated[str, Field(pattern=f"^chatcmpl-{keys.ID_PATTERN.pattern}$")]
        )
    ]
    order = _parameter("order", "query", Literal["asc", "desc"])
    replay = [
        _parameter("stream", "query", bool),
        _parameter("starting_after", "query", Annotated[int, Field(ge=0)]),
    ]
    events = {"text/event-stream": {"schema": {"type": "string"}}}
    return {
        formats.CHAT_URL: {
            "get": _operation(_json(ChatList), [*_paging(100), order, _parameter("model", "query", str)]),
            "post": _operation(_json(ChatCompletion) | events, headers, _json(ChatRequest)),
        },
        f"{formats.CHAT_URL}/{{completion_id}}": {
            "get": _operation(_json(ChatCompletion), chat),
            "post": _operation(_json(ChatCompletion), chat, _json(ChatUpdate)),
            "delete": _operation(_json(DeletedChat), chat),
        },
        f"{formats.CHAT_URL}/{{completion_id}}/messages": {
            "get": _operation(_json(ChatMessages), [*chat, *_paging(100), order]),
        },
        formats.COMPLETIONS_URL: {
            "post": _operation(_json(Completion) | events, headers, _json(CompletionRequest))
        },
        responses.RESPONSES_URL: {
            "post": _operation(_json(ResponseObject) | events, headers, _json(ResponseRequest))
        },
        f"{responses.RESPONSES_URL}/{{response_id}}": {
            "get": _operation(_json(ResponseObject) | events, [*response, *replay]),
            "delete": _operation(_json(DeletedResponse), response),
        },
        f"{responses.RESPONSES_URL}/{{response_id}}/cancel": {
            "post": _operation(_json(ResponseObject), response)
        },
        responses.INPUT_TOKENS_URL: {
            "post": _operation(_json(InputTokens), headers[:1], _json(ResponseRequest))
        },
        messages.MESSAGES_URL: {
            "post": _operation(
                _json(MessageObject) | events, headers, _json(MessageRequest), error=MessageError
            )
        },
        messages.COUNT_TOKENS_URL: {
            "post": _operation(
                _json(MessageTokens), headers[:1], _json(MessageTokensRequest), error=MessageError
            )
        },
        **{
            url: {"post": _operation(_json(answer), headers, _json(body))}
            for url, (body, answer) in _OPERATIONS.items()
        },
        "/v1/models": {"get": _operation(_json(ModelList))},
        "/v1/models/{model}": {"get": _operation(_json(Model), model)},
        **_file_paths(),
    }


def _file_paths() -> dict[str, Any]:
    file = [_parameter("file_id", "path", Annotated[str, Field(pattern=f"^{FILE_ID.pattern}$")])]
    batch = [_parameter("batch_id", "path", Annotated[str, Field(pattern=f"^{BATCH_ID.pattern}$")])]
    webhook = [_parameter("webhook_id", "path", Annotated[str, Field(pattern=f"^{HOOK_ID.pattern}$")])]
    filters = [_parameter("order", "query", Literal["asc", "desc"]), _parameter("purpose", "query", str)]
    binary = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    form = {"multipart/form-data": {"schema": _ref(FileUpload)}}
    return {
        "/v1/files": {
            "get": _operation(_json(FileList), [*_paging(10_000), *filters]),
            "post": _operation(_json(File), body=form),
        },
        "/v1/files/{file_id}": {
            "get": _operation(_json(File), file),
            "delete": _operation(_json(DeletedFile), file),
        },
        "/v1/files/{file_id}/content": {"get": _operation(binary, file)},
        "/v1/batches": {
            "get": _operation(_json(BatchList), _paging(100)),
            "post": _operation(_json(Batch), body=_json(BatchRequest)),
        },
        "/v1/batches/{batch_id}": {"get": _operation(_json(Batch), batch)},
        "/v1/webhook_endpoints": {
            "get": _operation(_json(WebhookList), _paging(100)),
            "post": _operation(_json(WebhookEndpoint), body=_json(WebhookRequest)),
        },
        "/v1/webhook_endpoints/{webhook_id}": {
            "get": _operation(_json(WebhookEndpoint), webhook),
            "delete": _operation(_json(DeletedWebhook), webhook),
        },
        "/v1/batches/{batch_id}/cancel": {"post": _operation(_json(Batch), batch)},
    }


def _operation(
    content: dict[str, Any],
    parameters: list[dict[str, Any]] | None = None,
    body: dict[str, Any] | None = None,
    error: type[BaseModel] = Error,
) -> dict[str, Any]:
    failed = {"description": "What is wrong, or too much.", "content": _json(error)}
    operation: dict[str, Any] = {
        "parameters": parameters or [],
        "responses": {"200": {"description": "Done.", "content": content}, "default": failed},
    }
    return operation if body is None else operation | {"requestBody": {"required": True, "content": body}}


def _json(model: type[BaseModel]) -> dict[str, Any]:
    return {"application/json": {"schema": _ref(model)}}


def _ref(model: type[BaseModel]) -> dict[str, Any]:
    return {"$ref": _REF + model.__name__}


def _parameter(name: str, place: str, kind: Any) -> dict[str, Any]:
    return {"name": name, "in": place, "required": place == "path", "schema": TypeAdapter(kind).json_schema()}


def _paging(most: int) -> list[dict[str, Any]]:
    limit = _parameter("limit", "query", Annotated[int, Field(ge=1, le=most)])
    return [limit, _parameter("after", "query", str)]
