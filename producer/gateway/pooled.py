"""/v1/embeddings, /v1/rerank, /v1/score and /v1/classify: submit, wait, respond."""

from __future__ import annotations

import time

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.completions import wait_for_all
from pagemill.producer.gateway.errors import JsonResponse
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.request_parsing import read_ask, read_object
from pagemill.producer.gateway.waiter import Waiter
from pagemill.producer.openai.formats import total_usage
from pagemill.producer.openai.pooled_formats import write_pooled
from pagemill.producer.wire.schema.errors import QueueFull


async def answer(gateway: Gateway, request: Request, url: str) -> Response:
    """Answer one request. Raises ApiError, ClientGone and the queue's errors."""
    caller = await gateway.admit(request)
    ask = await read_ask(request, url, caller, gateway.config)
    await gateway.models.check(ask.model, caller)
    await gateway.admit_prompts(caller, len(ask.jobs))
    waiter = Waiter(gateway, caller)
    try:
        await waiter.submit(ask.jobs)
    except QueueFull:
        gateway.metrics.refused["queue_full"] += 1
        raise
    results = await wait_for_all(request, ask, waiter)
    gateway.metrics.tokens["prompt"] += total_usage(result.usage for result in results).prompt_tokens
    body = await read_object(request)  # fields for the form of the response
    answered = write_pooled(url, waiter.handles[0].id, int(time.time()), body, results)
    return JsonResponse(answered, headers=waiter.headers())
