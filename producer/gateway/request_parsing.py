"""Parsing of a request's body into the requested jobs."""

from __future__ import annotations

import hashlib
import json
import math
import string
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast, get_args

from starlette.requests import Request

from pagemill.producer.anthropic.messages import COUNT_TOKENS_URL, MESSAGES_URL, read_message
from pagemill.producer.client.submit_flow import OnLate
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.errors import ApiError
from pagemill.producer.openai.formats import CHAT_URL, is_chat, parse_job, read_jobs
from pagemill.producer.openai.responses import RESPONSES_URL, is_stored, read_response
from pagemill.producer.openai.stored_responses import metadata_of
from pagemill.producer.openai.tokens import TOKEN_OPERATIONS, read_tokens
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import MAX_KEY, Job

TIMEOUT_HEADER = "x-request-timeout"
ESTIMATE_HEADER = "x-estimate"
STORED_CHAT = "chat"
"""The entry of a job's metadata for a chat completion that can be retrieved later."""
Conversation = Callable[[Any, ApiKey], Awaitable[list[dict[str, Any]]]]
"""Returns the messages of the response with an id, for a request that continues it."""
_BASE64 = (string.ascii_letters + string.digits + "+/").encode()
_STREAM_OPTIONS = {
    "include_usage": (True, False),
    # vLLM's field: usage so far in every chunk. Chunks before the last have null, since counts are known at the end.
    "continuous_usage_stats": (True, False),
    "include_obfuscation": (True, False),  # padding against observers of lengths, which is not sent
}


@dataclass(frozen=True, slots=True)
class ParsedRequest:
    """One request for completions: a job per prompt, all of one model, with `n` samples each."""

    url: str
    jobs: tuple[Job, ...]
    stream: bool
    include_usage: bool
    timeout_s: float
    response: Mapping[str, Any] | None = None
    """The body of a request for a response, which the chat in `jobs` represents."""
    on_late: OnLate | None = None
    """Whether to estimate when the jobs will end, and the action if that is after the deadline."""

    @property
    def model(self) -> str:
        """The request's name for the model, or for its adapter."""
        return self.jobs[0].adapter or self.jobs[0].model

    def of(self, fields: Mapping[str, str]) -> ParsedRequest:
        """Return a copy with other `model` and `adapter`."""
        return replace(self, jobs=tuple(job.model_copy(update=dict(fields)) for job in self.jobs))

    @property
    def n(self) -> int:
        return self.jobs[0].n

    @property
    def is_background(self) -> bool:
        """True if the job runs without a client that waits for it."""
        return self.response is not None and self.response.get("background") is True


def request_of(job: Job, timeout_s: float) -> ParsedRequest:
    """Return the request for the chat that a job represents."""
    return ParsedRequest(CHAT_URL, (job,), stream=True, include_usage=False, timeout_s=timeout_s)


async def read_ask(
    request: Request,
    url: str,
    caller: ApiKey,
    config: GatewayConfig,
    conversation: Conversation | None = None,
    *,
    default: Mapping[str, Any] | None = None,
) -> ParsedRequest:
    """Read a request for completions. Raises ApiError and InvalidJob.

    Args:
        conversation: For responses.
        default: Values of fields that the body lacks.
    """
    body = {**(default or {}), **await read_object(request, config.max_body_bytes)}
    response = dict(body) if url == RESPONSES_URL else None
    is_background = False
    stored_as: list[Any] = []
    own: dict[str, Any] = {"tenant": caller.tenant, "priority": caller.priority}
    if response is not None:
        is_background = _flag(response.get("background"), "background")
        _flag(response.get("store"), "store")
        before = response.get("previous_response_id")
        earlier = [] if before is None or conversation is None else await conversation(before, caller)
        url, body = CHAT_URL, read_response(body, earlier)
        if is_stored(response):
            own |= {"keep_input": True, "metadata": metadata_of(response)}
            stored_as = ["response", is_background, response.get("metadata")]
        if response.get("service_tier") == "flex":
            own["priority"] = "low"
    elif url == CHAT_URL and _flag(body.get("store"), "store"):
        kept = {name: body[name] for name in ("model", "metadata") if body.get(name) is not None}
        body = body | {"store": False}
        own |= {"keep_input": True, "metadata": {STORED_CHAT: kept}}
        stored_as = ["chat", kept.get("metadata")]
    elif url in (MESSAGES_URL, COUNT_TOKENS_URL):
        url, body = CHAT_URL, read_message(body, is_count=url == COUNT_TOKENS_URL)
    is_stream = _flag(body.pop("stream", None), "stream")
    include_usage = _read_stream_options(body.pop("stream_options", None), is_stream)
    timeout_s = _read_timeout(request, config.background_s if is_background else config.timeout_s)
    own |= {"stream": is_stream, "ttl": timeout_s}
    if config.separate_reasoning and is_chat(url):
        own["separate_reasoning"] = True
    name = _read_idempotency_key(request)
    jobs: list[Job] = []
    size, rows = 0, [read_tokens(url, body)] if url in TOKEN_OPERATIONS else read_jobs(url, body)
    if name is not None and (stored_as or len(rows) > 1):  # the queue only compares the work of one job
        name = _distinguished(name, stored_as, len(rows))
    for position, fields in enumerate(rows):
        if name is not None:
            own["idempotency_key"] = f"{name}/{position}" if position else name
        jobs.append(parse_job(fields | own))
        size += len(jobs[-1].to_payload()) if len(rows) > 1 else 0  # a single job has its own limit
        if size > config.max_stored_bytes:
            # Shared settings are stored with every prompt, so a small body may need much storage.
            most = f"at most {config.max_stored_bytes} bytes are stored"
            message = f"{len(rows)} prompts, each with the request's settings, are too many: {most}"
            raise ApiError(413, message, "request_too_large", "prompt")
    if is_stream and jobs[-1].prompt_logprobs is not None:
        raise InvalidJob("echo with output can't be streamed", "unsupported_feature", "echo")
    return ParsedRequest(
        url, tuple(jobs), is_stream, include_usage, timeout_s, response, _read_on_late(request)
    )


def as_count(ask: ParsedRequest) -> ParsedRequest:
    """Return a request for the prompt's length: one token, without settings for the form of the output."""
    free = {
        "max_tokens": 1, "structured_outputs": None, "idempotency_key": None, "stream": False,
        "keep_input": False, "metadata": None,
    }  # fmt: skip
    return replace(
        ask, jobs=tuple(job.model_copy(update=free) for job in ask.jobs), stream=False, on_late=None
    )


async def read_object(request: Request, max_bytes: int | None = None) -> dict[str, Any]:
    """Read the body, a JSON object.

    Args:
        max_bytes: maximum of characters other than letters, digits, + and /, of which images consist.

    Raises:
        ApiError: the body is not a JSON object, or larger.
    """
    check_json(request)
    content = await request.body()
    if max_bytes is not None and len(content) > max_bytes:
        # Many small values would take long to parse and block other requests; an image is a single string.
        size = len(content.translate(None, _BASE64))
        if size > max_bytes:
            message = f"the request's body has more than {max_bytes} bytes without images"
            raise ApiError(413, message, "body_too_large")
    try:
        found = json.loads(content, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        place = (
            f" (line {error.lineno}, column {error.colno})" if isinstance(error, json.JSONDecodeError) else ""
        )
        raise ApiError(400, f"the body is not valid JSON{place}", "invalid_json") from None
    if not isinstance(found, dict):
        raise ApiError(400, "the body must be a JSON object", "invalid_json")
    return found


def check_json(request: Request, *, may_be_unsaid: bool = False) -> None:
    """Require JSON: browsers post other types across origins without a preflight. Raises ApiError."""
    said = request.headers.get("content-type", "")
    if said.partition(";")[0].strip().lower() != "application/json" and (said or not may_be_unsaid):
        raise ApiError(415, "the content type must be application/json", "unsupported_media_type")


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _flag(value: Any, name: str) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidJob(f"{name}: Input should be a valid boolean", param=name)
    return bool(value)


def _read_stream_options(options: Any, is_stream: bool) -> bool:
    """Return whether the stream should end with the usage."""
    if options is None:
        return False
    if not is_stream:
        raise InvalidJob("stream_options needs stream: true", param="stream_options")
    if not isinstance(options, Mapping):
        raise InvalidJob("stream_options: Input should be an object", param="stream_options")
    for name, value in options.items():
        place = f"stream_options.{name[:64]}"
        if value is None:
            continue
        if not isinstance(value, bool) and name in _STREAM_OPTIONS:
            raise InvalidJob(f"{place}: Input should be a valid boolean", param=place)
        if value not in _STREAM_OPTIONS.get(name, ()):
            raise InvalidJob(f"{place} is not supported", "unsupported_feature", place)
    return bool(options.get("include_usage"))


def _read_timeout(request: Request, longest_s: float) -> float:
    given = request.headers.get(TIMEOUT_HEADER)
    if given is None:
        return longest_s
    try:
        seconds = float(given)
    except ValueError:
        seconds = math.nan
    if not 0.0 < seconds <= longest_s:
        message = f"{TIMEOUT_HEADER} is a number of seconds, at most {longest_s:g}"
        raise ApiError(400, message, "invalid_timeout", TIMEOUT_HEADER)
    return seconds


def _read_on_late(request: Request) -> OnLate | None:
    given = request.headers.get(ESTIMATE_HEADER)
    if given is not None and given not in get_args(OnLate):
        message = f"{ESTIMATE_HEADER} is {' or '.join(get_args(OnLate))}"
        raise ApiError(400, message, "invalid_estimate", ESTIMATE_HEADER)
    return cast("OnLate | None", given)


def _distinguished(name: str, *facts: Any) -> str:
    """Return the idempotency key of a request with these facts, which the job's work does not contain."""
    text = json.dumps([name, *facts], sort_keys=True)
    return f"{name[: MAX_KEY - 37]}#{hashlib.blake2b(text.encode(), digest_size=16).hexdigest()}"


def _read_idempotency_key(request: Request) -> str | None:
    """Read the key; a request that is repeated under the same key gets the job of the first one."""
    name = request.headers.get("idempotency-key")
    if name is not None and not (0 < len(name) <= MAX_KEY - 4 and name.isascii() and name.isprintable()):
        raise ApiError(400, "the idempotency key is too long, or no plain text", "invalid_idempotency_key")
    return name
