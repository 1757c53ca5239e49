"""/v1/messages and /v1/messages/count_tokens: Anthropic's interface to the same jobs."""

from __future__ import annotations

import json
import time
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.anthropic import messages
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.gateway.completions import prompt_tokens, streamed, submitted, wait_for_all
from pagemill.producer.gateway.errors import ApiError, JsonResponse, as_api_error
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.request_parsing import ParsedRequest, read_ask
from pagemill.producer.gateway.streaming import CompletionStream, TextDelta
from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.schema.outputs import Output, PositionLogprobs

_DELTAS: dict[str | int, tuple[str, str]] = {
    "content": ("text_delta", "text"),
    "reasoning": ("thinking_delta", "thinking"),
}
_CALL_DELTA = ("input_json_delta", "partial_json")


async def answer(gateway: Gateway, request: Request) -> Response:
    """Answer a request for a message, errors included. Raises ClientGone."""
    return await _with_errors(_answer, gateway, request)


async def count_tokens(gateway: Gateway, request: Request) -> Response:
    """Answer with the tokens of a request's prompt, by a job that generates one token. Raises ClientGone."""
    return await _with_errors(_count_tokens, gateway, request)


async def _with_errors(
    endpoint: Callable[[Gateway, Request], Awaitable[Response]], gateway: Gateway, request: Request
) -> Response:
    try:
        return await endpoint(gateway, request)
    except ApiError as error:
        api_error = error
    except PagemillError as error:
        api_error = as_api_error(error)
    return api_error.response(request.url.path)


async def _answer(gateway: Gateway, request: Request) -> Response:
    started = time.monotonic()
    caller = await gateway.admit(request)
    ask = await read_ask(request, messages.MESSAGES_URL, caller, gateway.config)
    ask, waiter = await submitted(gateway, ask, caller)
    handle = waiter.handles[0]
    if ask.stream:
        answered = await streamed(gateway, request, MessageStream(ask, handle), waiter, started)
    else:
        (result,) = await wait_for_all(request, ask, waiter)
        gateway.count_tokens(result.usage)
        answered = JsonResponse(messages.message(ask.model, handle.id, result))
    answered.headers.update(waiter.headers())
    return answered


async def _count_tokens(gateway: Gateway, request: Request) -> Response:
    count, headers = await prompt_tokens(gateway, request, messages.COUNT_TOKENS_URL)
    return JsonResponse({"input_tokens": count}, headers=headers)


class MessageStream(CompletionStream):
    """The events of one message. Its blocks open sequentially: reasoning, text, calls."""

    def __init__(self, ask: ParsedRequest, handle: AsyncJobHandle) -> None:
        super().__init__(ask, [handle])
        self._message = messages.message(ask.model, handle.id)
        self._has_begun = False
        self._num_blocks = 0
        self._open: str | int | None = None
        """The part whose block is open."""

    def _begin(self, number: int, index: int) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [_event("message_start", message=self._message)]

    def _pieces(
        self, number: int, index: int, news: list[TextDelta], positions: tuple[PositionLogprobs, ...] | None
    ) -> list[bytes]:
        events = []
        for one in news:
            if one.part != self._open:
                events += [*self._close_block(), self._open_block(one)]
            if one.text:
                kind, name = _DELTAS.get(one.part, _CALL_DELTA)
                delta = {"type": kind, name: one.text}
                events.append(_event("content_block_delta", index=self._num_blocks, delta=delta))
        return events

    def _finish(self, number: int, output: Output) -> list[bytes]:
        events = (
            [self._open_block(TextDelta("content", ""))]
            if not self._num_blocks and self._open is None
            else []
        )
        return [*events, *self._close_block()]

    def _closing(self) -> list[bytes]:
        result = self._results[0]
        delta = {"stop_reason": messages.stop_reason(result.outputs[0]), "stop_sequence": None}
        usage = messages.usage_body(result.usage)
        return [_event("message_delta", delta=delta, usage=usage), _event("message_stop")]

    def _failing(self, error: ApiError) -> bytes:
        return b"event: error\ndata: %b\n\n" % json.dumps(error.anthropic_body()).encode()

    def _open_block(self, news: TextDelta) -> bytes:
        self._open = news.part
        call = news.call
        empty = messages.block(news.part, *(() if call is None else (call.id or "", call.name or "")))
        return _event("content_block_start", index=self._num_blocks, content_block=empty)

    def _close_block(self) -> list[bytes]:
        if self._open is None:
            return []
        done = _event("content_block_stop", index=self._num_blocks)
        self._open, self._num_blocks = None, self._num_blocks + 1
        return [done]


def _event(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields}, separators=(",", ":"), allow_nan=False)
    return f"event: {kind}\ndata: {data}\n\n".encode()
