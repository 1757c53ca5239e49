"""The gateway as an ASGI application."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagemill.producer.anthropic.messages import COUNT_TOKENS_URL, MESSAGES_URL, model_object
from pagemill.producer.gateway import completions, messages, openapi, pooled, tokens
from pagemill.producer.gateway.batches.batches import BatchEndpoints
from pagemill.producer.gateway.batches.files import FileEndpoints
from pagemill.producer.gateway.batches.runner import BatchRunner
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.errors import ApiError, JsonResponse, as_api_error, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.guard.limits import STATUS_CLIENT_GONE, ClientGone, RequestLimits
from pagemill.producer.gateway.jobs.endpoints import job_routes
from pagemill.producer.gateway.jobs.page import announce_page
from pagemill.producer.gateway.metrics import GatewayMetrics, choose_encoding
from pagemill.producer.gateway.stored_chats import StoredChats
from pagemill.producer.gateway.stored_responses import StoredResponses
from pagemill.producer.gateway.webhook_endpoints import WebhookEndpoints
from pagemill.producer.gateway.webhooks import Webhooks
from pagemill.producer.openai.formats import CHAT_URL, COMPLETIONS_URL
from pagemill.producer.openai.pooled_formats import POOLED_URLS
from pagemill.producer.openai.responses import INPUT_TOKENS_URL, RESPONSES_URL
from pagemill.producer.openai.tokens import TOKEN_OPERATIONS
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.schema.errors import PagemillError

logger = logging.getLogger(__name__)

Endpoint = Callable[[Request], Awaitable[Response]]
_READY_PATIENCE_S = 2.0


def build_app(
    config: GatewayConfig, metrics: GatewayMetrics | None = None, *, runs_batches: bool = True
) -> RequestLimits:
    """Build the application; it connects on the first request. Raises KeyFileError.

    Without `runs_batches`, it leaves accepted batches and events to the other gateways of the queue.
    """
    gateway = Gateway(config, metrics or GatewayMetrics())
    webhooks = Webhooks(gateway)
    runner = BatchRunner(gateway, webhooks)
    routes = _routes(gateway, runner)

    @contextlib.asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        batches = asyncio.create_task(runner.run(), name="pagemill-batches") if runs_batches else None
        link = asyncio.create_task(announce_page(gateway), name="pagemill-jobs-page")
        notices = asyncio.create_task(webhooks.run(), name="pagemill-webhooks") if runs_batches else None
        try:
            yield
        finally:
            link.cancel()
            if notices is not None:
                notices.cancel()
            await gateway.close(batches)

    app = Starlette(
        routes=routes,
        lifespan=lifespan,
        exception_handlers={
            ApiError: _on_api_error,
            PagemillError: _on_queue_error,
            ClientGone: _on_client_gone,
            HTTPException: _on_http_error,
            Exception: _on_bug,
        },
    )
    app.router.redirect_slashes = False
    return RequestLimits(app, config, gateway.metrics, {route.endpoint: route.path for route in routes})


def _routes(gateway: Gateway, runner: BatchRunner) -> list[Route]:
    files = FileEndpoints(gateway)
    batches = BatchEndpoints(gateway, runner, files)
    hooks = WebhookEndpoints(gateway)
    stored, chats = StoredResponses(gateway), StoredChats(gateway)

    async def chat(request: Request) -> Response:
        return await completions.answer(gateway, request, CHAT_URL)

    async def complete(request: Request) -> Response:
        return await completions.answer(gateway, request, COMPLETIONS_URL)

    async def respond(request: Request) -> Response:
        return await completions.answer(gateway, request, RESPONSES_URL)

    async def count_input(request: Request) -> Response:
        return await completions.count_input(gateway, request)

    async def message(request: Request) -> Response:
        return await messages.answer(gateway, request)

    async def count_tokens(request: Request) -> Response:
        return await messages.count_tokens(gateway, request)

    return [
        Route(CHAT_URL, _by_method(POST=chat, GET=chats.list), methods=["POST", "GET"]),
        Route(f"{CHAT_URL}/{{completion_id}}/messages", chats.messages, methods=["GET"]),
        Route(
            f"{CHAT_URL}/{{completion_id}}",
            _by_method(GET=chats.retrieve, POST=chats.update, DELETE=chats.delete),
            methods=["GET", "POST", "DELETE"],
        ),
        Route(INPUT_TOKENS_URL, count_input, methods=["POST"]),
        Route(RESPONSES_URL, respond, methods=["POST"]),
        Route(f"{RESPONSES_URL}/{{response_id}}/cancel", stored.cancel, methods=["POST"]),
        Route(
            f"{RESPONSES_URL}/{{response_id}}",
            _by_method(GET=stored.retrieve, DELETE=stored.delete),
            methods=["GET", "DELETE"],
        ),
        Route(COMPLETIONS_URL, complete, methods=["POST"]),
        Route(MESSAGES_URL, message, methods=["POST"]),
        Route(COUNT_TOKENS_URL, count_tokens, methods=["POST"]),
        *(_body_route(gateway, url, pooled.answer) for url in POOLED_URLS),
        *(_body_route(gateway, url, tokens.answer) for url in TOKEN_OPERATIONS),
        *_model_routes(gateway),
        Route("/v1/files", _by_method(POST=files.create, GET=files.list), methods=["POST", "GET"]),
        Route("/v1/files/{file_id}/content", files.content, methods=["GET"]),
        Route(
            "/v1/files/{file_id}",
            _by_method(GET=files.retrieve, DELETE=files.delete),
            methods=["GET", "DELETE"],
        ),
        Route("/v1/batches", _by_method(POST=batches.create, GET=batches.list), methods=["POST", "GET"]),
        Route("/v1/batches/{batch_id}/cancel", batches.cancel, methods=["POST"]),
        Route("/v1/batches/{batch_id}", batches.retrieve, methods=["GET"]),
        Route(
            "/v1/webhook_endpoints", _by_method(POST=hooks.create, GET=hooks.list), methods=["POST", "GET"]
        ),
        Route(
            "/v1/webhook_endpoints/{webhook_id}",
            _by_method(GET=hooks.retrieve, DELETE=hooks.delete),
            methods=["GET", "DELETE"],
        ),
        *job_routes(gateway),
        *_operator_routes(gateway),
    ]


def _body_route(
    gateway: Gateway, url: str, answer: Callable[[Gateway, Request, str], Awaitable[Response]]
) -> Route:
    async def endpoint(request: Request) -> Response:
        return await answer(gateway, request, url)

    return Route(url, endpoint, methods=["POST"])


def _model_routes(gateway: Gateway) -> list[Route]:
    async def models(request: Request) -> Response:
        found = await gateway.models.all(await gateway.admit(request))
        if "anthropic-version" in request.headers:
            data = [model_object(model.id, model.created) for model in found]
            ends = {"first_id": data[0]["id"], "last_id": data[-1]["id"]} if data else {}
            return JsonResponse({"data": data, "has_more": False, "first_id": None, "last_id": None} | ends)
        return JsonResponse({"object": "list", "data": [model.model_dump() for model in found]})

    async def model(request: Request) -> Response:
        wanted = str(request.path_params["model"])
        found = await gateway.models.find(wanted, await gateway.admit(request))
        if found is None:
            raise not_found("model", wanted)
        if "anthropic-version" in request.headers:
            return JsonResponse(model_object(found.id, found.created))
        return JsonResponse(found.model_dump())

    return [
        Route("/v1/models", models, methods=["GET"]),
        Route("/v1/models/{model:path}", model, methods=["GET"]),
    ]


def _operator_routes(gateway: Gateway) -> list[Route]:
    """Return the routes for probes, scrapers and tools, which need no key."""

    async def healthy(request: Request) -> Response:
        return JsonResponse({"status": "alive"})

    async def ready(request: Request) -> Response:
        try:
            async with asyncio.timeout(_READY_PATIENCE_S):
                await gateway.run(registry.workers(gateway.config.queue))
        except (PagemillError, TimeoutError):
            return JsonResponse({"status": "the queue is not reachable"}, 503)
        return JsonResponse({"status": "ready", "time": int(time.time())})

    async def metrics(request: Request) -> Response:
        encode, content_type = choose_encoding(request.headers.get("accept", ""))
        return Response(gateway.metrics.exposition(encode), headers={"content-type": content_type})

    async def described(request: Request) -> Response:
        return JsonResponse(openapi.description())

    return [
        Route("/healthz", healthy, methods=["GET"]),
        Route("/health", healthy, methods=["GET"]),  # the name used by other engines' servers
        Route("/readyz", ready, methods=["GET"]),
        Route("/metrics", metrics, methods=["GET"]),
        Route("/openapi.json", described, methods=["GET"]),
    ]


def _by_method(**endpoints: Endpoint) -> Endpoint:
    """Combine a path's endpoints, so that a 405 can list the allowed methods."""

    async def endpoint(request: Request) -> Response:
        return await endpoints["GET" if request.method == "HEAD" else request.method](request)

    return endpoint


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error.response(request.scope["path"])


async def _on_queue_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, PagemillError)
    api_error = as_api_error(error)
    if api_error.status in (500, 503):
        logger.warning("%s %s: %s", request.method, request.scope["path"][:128], error)
    return api_error.response(request.scope["path"])


async def _on_client_gone(request: Request, error: Exception) -> Response:
    return Response(status_code=STATUS_CLIENT_GONE)


async def _on_http_error(request: Request, error: Exception) -> Response:
    """Answer Starlette's own errors: unknown path, method not allowed."""
    assert isinstance(error, HTTPException)
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code)
    return ApiError(error.status_code, str(error.detail), code, headers=error.headers or {}).response(
        request.scope["path"]
    )


async def _on_bug(request: Request, error: Exception) -> Response:
    return ApiError(500, "internal error", "internal_error").response(request.scope["path"])
