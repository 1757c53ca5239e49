"""/v1/chat/completions, /v1/completions and /v1/responses: submit, wait or stream, respond."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.errors import JsonResponse
from pagemill.producer.gateway.gateway import Gateway, while_connected
from pagemill.producer.gateway.request_parsing import ParsedRequest, as_count, read_ask
from pagemill.producer.gateway.responses import ResponseStream
from pagemill.producer.gateway.stored_responses import StoredResponses, begin
from pagemill.producer.gateway.streaming import GRACE_S, CompletionStream, EventStream
from pagemill.producer.gateway.waiter import Waiter
from pagemill.producer.openai.formats import choices, completion, total_usage
from pagemill.producer.openai.responses import RESPONSES_URL, response
from pagemill.producer.wire.schema.errors import QueueFull
from pagemill.producer.wire.schema.outputs import Result


async def answer(gateway: Gateway, request: Request, url: str) -> Response:
    """Answer one request for completions. Raises ApiError, ClientGone and the queue's errors."""
    started = time.monotonic()
    caller = await gateway.admit(request)
    ask = await read_ask(request, url, caller, gateway.config, StoredResponses(gateway).conversation)
    ask, waiter = await submitted(gateway, ask, caller)
    if ask.is_background:
        answered = await begin(gateway, ask, waiter.handles[0], int(time.time()))
    elif ask.stream:
        answered = await streamed(gateway, request, _stream(ask, waiter), waiter, started)
    else:
        answered = await _complete(gateway, request, ask, waiter)
    answered.headers.update(waiter.headers())
    return answered


async def count_input(gateway: Gateway, request: Request) -> Response:
    """Answer /v1/responses/input_tokens. Raises ApiError, ClientGone and the queue's errors."""
    count, headers = await prompt_tokens(gateway, request, RESPONSES_URL)
    return JsonResponse({"object": "response.input_tokens", "input_tokens": count}, headers=headers)


async def prompt_tokens(gateway: Gateway, request: Request, url: str) -> tuple[int, dict[str, str]]:
    """Return the tokens of a request's prompt, and headers of the response.

    A job generates one token: its usage is that of the real request.

    Raises ApiError, ClientGone and the queue's errors.
    """
    caller = await gateway.admit(request)
    conversation = StoredResponses(gateway).conversation
    ask = as_count(await read_ask(request, url, caller, gateway.config, conversation))
    ask, waiter = await submitted(gateway, ask, caller)
    usage = total_usage(result.usage for result in await wait_for_all(request, ask, waiter))
    gateway.count_tokens(usage)
    return usage.prompt_tokens, waiter.headers()


async def submitted(gateway: Gateway, ask: ParsedRequest, caller: ApiKey) -> tuple[ParsedRequest, Waiter]:
    """Submit a request's jobs for the model that it names. Raises ApiError and the queue's errors."""
    ask = ask.of(await gateway.models.resolve(ask.model, caller))
    await gateway.admit_prompts(caller, len(ask.jobs))
    waiter = Waiter(gateway, caller, ask.on_late, is_counted=not ask.is_background)
    try:
        await waiter.submit(ask.jobs)
    except QueueFull:
        gateway.metrics.refused["queue_full"] += 1
        raise
    return ask, waiter


async def _complete(gateway: Gateway, request: Request, ask: ParsedRequest, waiter: Waiter) -> Response:
    handles = waiter.handles
    results = await wait_for_all(request, ask, waiter)
    usage = total_usage(result.usage for result in results)
    gateway.count_tokens(usage)
    if ask.response is not None:
        return JsonResponse(response(ask.response, handles[0].id, int(time.time()), results[0]))
    samples = [
        sample
        for number, (job, result) in enumerate(zip(ask.jobs, results, strict=True))
        for sample in choices(ask.url, result, job.prompt, number * ask.n)
    ]
    body = completion(
        ask.url, handles[0].id, created=int(time.time()), model=ask.model, choices=samples, usage=usage
    )
    return JsonResponse(body | {"system_fingerprint": results[0].fingerprint or None})


async def wait_for_all(request: Request, ask: ParsedRequest, waiter: Waiter) -> list[Result]:
    """Return the results of a request's jobs. A disconnection or the first error stops waiting for them."""
    handles = waiter.handles
    try:
        return await while_connected(
            request, _all(*(handle.result(ask.timeout_s + GRACE_S) for handle in handles))
        )
    except BaseException:
        waiter.leave(handles)
        raise


async def _all(*waits: object) -> list[Result]:
    """Return all results, or raise the first error and stop waiting for the others."""
    tasks = [asyncio.ensure_future(wait) for wait in waits]  # type: ignore[call-overload]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()


def _stream(ask: ParsedRequest, waiter: Waiter) -> CompletionStream:
    if ask.response is None:
        return CompletionStream(ask, waiter.handles)
    return ResponseStream(ask, waiter.handles[0], ask.response)


async def streamed(
    gateway: Gateway, request: Request, stream: CompletionStream, waiter: Waiter, started: float
) -> Response:
    """Stream the response. It starts with the first event, so that earlier errors have their own status.

    Args:
        started: Monotonic seconds at which the request arrived.
    """
    chunks = stream.chunks()
    try:
        first = await while_connected(request, anext(chunks))
    except BaseException:
        await chunks.aclose()
        waiter.leave(stream.unfinished())
        raise
    gateway.metrics.first_token_seconds.observe(time.monotonic() - started)

    def closed() -> None:
        gateway.metrics.streams -= 1
        gateway.metrics.stream_errors += stream.has_failed
        gateway.count_tokens(stream.usage())
        waiter.leave(stream.unfinished())

    gateway.metrics.streams += 1
    return EventStream(first, chunks, gateway.config.ping_s, closed)
