"""Errors in OpenAI's format: a status code and `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from starlette.responses import Response

from pagemill.producer.anthropic.messages import COUNT_TOKENS_URL, MESSAGES_URL, THREAD
from pagemill.producer.wire.schema.errors import (
    AccessDenied,
    DeadlineUnreachable,
    IdempotencyConflict,
    InvalidJob,
    JobError,
    JobNotFound,
    PagemillError,
    QueueFull,
    RedisUnavailable,
    ResultExpired,
    ResultTimeout,
    StoreError,
)
from pagemill.producer.wire.schema.job import Job

RETRY_AFTER_S = 1
ANTHROPIC_URLS = (MESSAGES_URL, COUNT_TOKENS_URL)
"""URLs whose errors have Anthropic's format."""
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
}
_JOB_STATUS = {
    "deadline_exceeded": 504,
    "unknown_model": 404,
    "unknown_adapter": 404,
    "payload_too_large": 413,
    "out_of_memory": 503,
    "store_unavailable": 503,
    "cancelled": 410,
    "parent_failed": 410,
    "condition_false": 410,
    "unsigned": 500,
    "schema_mismatch": 500,
}
"""Status by the job's error code. 410 for a cancelled job, because clients retry milder statuses."""


@dataclass(slots=True)
class ApiError(Exception):
    """An error response. The message never quotes a prompt."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    headers: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.message

    def body(self) -> dict[str, Any]:
        fallback = "server_error" if self.status >= 500 else "invalid_request_error"
        kind = _TYPES.get(self.status, fallback)
        return {
            "error": {"message": self.message, "type": kind, "param": self.param, "code": self.code},
        }

    def anthropic_body(self) -> dict[str, Any]:
        kind = _ANTHROPIC_TYPES.get(
            self.status, "api_error" if self.status >= 500 else "invalid_request_error"
        )
        error: dict[str, Any] = {"type": kind, "message": self.message}
        if self.param == THREAD:  # clients then continue without threads
            error["details"] = {"error_code": "thread_unsupported_request", "unsupported": [THREAD]}
        return {"type": "error", "error": error}

    def response(self, path: str = "") -> Response:
        """Return the response to a request of this path, in the path's format."""
        body = self.anthropic_body() if path in ANTHROPIC_URLS else self.body()
        return JsonResponse(body, self.status, self.headers)


class JsonResponse(Response):
    """A response in ASCII-only JSON, so that it can quote any text a client sent."""

    media_type = "application/json"

    def __init__(
        self, content: Any, status_code: int = 200, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(content, status_code, headers)

    def render(self, content: Any) -> bytes:
        return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def not_found(what: str, name: str) -> ApiError:
    return ApiError(404, f"no {what} {name[:64]!a}", f"{what}_not_found")


def retry_later(status: int, message: str, code: str, wait_s: float = RETRY_AFTER_S) -> ApiError:
    return ApiError(status, message, code, headers={"retry-after": str(max(1, round(wait_s + 0.49)))})


def wait_headers(wait_s: float | None) -> dict[str, str]:
    """Return the header with the expected wait of a request in seconds; none if it is unknown."""
    return {} if wait_s is None else {"x-pagemill-queue-seconds": f"{wait_s:.3f}"}


def stopping() -> ApiError:
    return retry_later(503, "the gateway is being stopped", "stopping")


_OTHER_TASK = re.compile(
    r" and does not accept [a-z, ]+ jobs: submit with task (embed|rerank|classify|generate)(?: or (classify|score))?"
)
_URLS_OF_TASKS = {
    "embed": "/v1/embeddings",
    "rerank": "/v1/rerank or /v1/score",
    "classify": "/v1/classify",
    "generate": "/v1/chat/completions or /v1/completions",
}


def in_openai_words(code: str, message: str) -> tuple[str, str]:
    """Return an error's code and message as OpenAI's clients recognize them: some shorten the prompt and retry."""
    if code == "prompt_too_long":
        return "context_length_exceeded", f"the model's maximum context length is exceeded: {message}"
    return code, _OTHER_TASK.sub(_with_urls, message)


def _with_urls(found: re.Match[str]) -> str:
    return ": use " + " or ".join(_URLS_OF_TASKS[task] for task in found.groups() if task in _URLS_OF_TASKS)


def error_body(code: str, message: str) -> dict[str, str]:
    """Return the `error` of a response object."""
    code, message = in_openai_words(code, message)
    return {"code": code, "message": message}


def as_api_error(error: PagemillError) -> ApiError:
    """Return the error response for an error of the queue."""
    match error:
        case InvalidJob():
            status = _JOB_STATUS.get(error.code, 400)
            code, message = in_openai_words(error.code, str(error))
            return ApiError(status, message, code, error.param)
        case QueueFull(reason="memory"):
            return retry_later(503, "the queue's server has no room for more jobs now", "queue_out_of_memory")
        case QueueFull():
            return retry_later(429, str(error), "queue_full")
        case DeadlineUnreachable(estimate=estimate):
            late_s = (estimate.p50 or 0.0) - (estimate.deadline or 0.0)
            api_error = retry_later(429, str(error), "deadline_unreachable", late_s)
            api_error.headers = dict(api_error.headers) | wait_headers(estimate.wait_s)
            return api_error
        case StoreError(kind="away"):
            return retry_later(503, "the store of large requests is not reachable now", "store_unavailable")
        case RedisUnavailable() | AccessDenied():
            # The address and the cause belong in the log, not in the response.
            return retry_later(503, "the queue is not reachable now", "queue_unavailable")
        case IdempotencyConflict():
            return ApiError(409, "the idempotency key belongs to another request", "idempotency_conflict")
        case ResultTimeout():
            return ApiError(504, "the request's deadline has passed", "deadline_exceeded")
        case JobError():
            return _as_ended(error)
        case JobNotFound() | ResultExpired():
            return ApiError(500, "the result has been removed: send the request again", "result_gone")
    return ApiError(500, "internal error", "internal_error")


def _as_ended(error: JobError) -> ApiError:
    status = _JOB_STATUS.get(error.code, 400 if error.state == "failed" and not error.retryable else 500)
    if status == 503:
        return retry_later(status, error.message, error.code)
    code, message = in_openai_words(error.code or error.state, error.message)
    return ApiError(status, message, code, _named_field(message) if status == 400 else None)


def _named_field(message: str) -> str | None:
    """Return the field of the request at the start of a worker's message; None if it does not name one."""
    name, colon, _ = message.partition(":")
    is_field = bool(colon) and name in (*Job.model_fields, "tokens")
    return "prompt" if name == "prompt_token_ids" else name if is_field else None
