"""/tokenize and /detokenize: submit a small job, wait, respond."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.completions import submitted, wait_for_all
from pagemill.producer.gateway.errors import JsonResponse
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.request_parsing import read_ask, read_object
from pagemill.producer.openai.tokens import DETOKENIZE_URL, text_body, tokens_body
from pagemill.producer.wire.schema.errors import JobFailed


async def answer(gateway: Gateway, request: Request, url: str) -> Response:
    """Respond to one request; without a `model` it uses the only one. Raises ApiError, ClientGone and queue errors."""
    caller = await gateway.admit(request)
    body = await read_object(request)
    models = [] if "model" in body else await gateway.models.all(caller)
    default = {"model": models[0].id} if len(models) == 1 else {}
    ask = await read_ask(request, url, caller, gateway.config, default=default)
    ask, waiter = await submitted(gateway, ask, caller)
    try:
        (result,) = await wait_for_all(request, ask, waiter)
    except JobFailed as error:
        message = error.message.replace("continuations:", "tokens:", 1)
        raise JobFailed(message, error.code, error.retryable) from error
    gateway.count_tokens(result.usage)
    if url == DETOKENIZE_URL:
        return JsonResponse(text_body(result), headers=waiter.headers())
    length = gateway.models.max_model_len(ask.jobs[0].model)
    answered = tokens_body(result, length, has_texts=body.get("return_token_strs") is True)
    return JsonResponse(answered, headers=waiter.headers())
