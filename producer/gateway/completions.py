"""/v1/chat/completions, /v1/completions and /v1/responses: submit, wait or stream, answer."""

from __future__ import annotations

import asyncio
import time

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.errors import JsonResponse
from pagemill.producer.gateway.gateway import Gateway, while_connected
from pagemill.producer.gateway.request_parsing import Ask, read_ask
from pagemill.producer.gateway.responses import ResponseStream
from pagemill.producer.gateway.streaming import GRACE_S, CompletionStream, EventStream
from pagemill.producer.gateway.waiter import Waiter
from pagemill.producer.openai.formats import choice, completion, total_usage
from pagemill.producer.openai.responses import response
from pagemill.producer.wire.schema.errors import QueueFull
from pagemill.producer.wire.schema.outputs import Result


async def answer(gateway: Gateway, request: Request, url: str) -> Response:
    """Answer one request for completions. Raises ApiError, ClientGone and the queue's errors."""
    started = time.monotonic()
    caller = await gateway.admit(request)
    ask = await read_ask(request, url, caller, gateway.config)
    ask = ask.of(await gateway.models.resolve(ask.model, caller))
    await gateway.admit_prompts(caller, len(ask.jobs))
    waiter = Waiter(gateway, caller, ask.on_late)
    try:
        await waiter.submit(ask.jobs)
    except QueueFull:
        gateway.metrics.refused["queue_full"] += 1
        raise
    if ask.stream:
        answered = await _streamed(gateway, request, ask, waiter, started)
    else:
        answered = await _whole(gateway, request, ask, waiter)
    answered.headers.update(waiter.headers())
    return answered


async def _whole(gateway: Gateway, request: Request, ask: Ask, waiter: Waiter) -> Response:
    handles = waiter.handles
    results = await wait_for_all(request, ask, waiter)
    usage = total_usage(result.usage for result in results)
    gateway.metrics.tokens["prompt"] += usage.prompt_tokens
    gateway.metrics.tokens["completion"] += usage.completion_tokens
    if ask.response is not None:
        return JsonResponse(response(ask.response, handles[0].id, int(time.time()), results[0]))
    choices = [
        choice(ask.url, output, number * ask.n + output.index)
        for number, result in enumerate(results)
        for output in result.outputs
    ]
    body = completion(
        ask.url, handles[0].id, created=int(time.time()), model=ask.model, choices=choices, usage=usage
    )
    return JsonResponse(body | {"system_fingerprint": results[0].fingerprint or None})


async def wait_for_all(request: Request, ask: Ask, waiter: Waiter) -> list[Result]:
    """Return the results of a request's jobs; a hang-up or the first error leaves them."""
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


async def _streamed(gateway: Gateway, request: Request, ask: Ask, waiter: Waiter, started: float) -> Response:
    """Stream the answer. It starts with the first event, so that an earlier error has its own status."""
    if ask.response is None:
        stream = CompletionStream(ask, waiter.handles)
    else:
        stream = ResponseStream(ask, waiter.handles[0], ask.response)
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
        gateway.metrics.tokens["prompt"] += stream.usage().prompt_tokens
        gateway.metrics.tokens["completion"] += stream.usage().completion_tokens
        waiter.leave(stream.unfinished())

    gateway.metrics.streams += 1
    return EventStream(first, chunks, gateway.config.ping_s, closed)
