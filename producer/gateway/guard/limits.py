"""Limits on concurrent requests and on the size and slowness of bodies, and the metrics of all requests.

Plain ASGI around the application. A body is counted as it arrives, regardless of the declared length.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Mapping

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from pagemill.producer.anthropic.messages import COUNT_TOKENS_URL, MESSAGES_URL
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.errors import ApiError, retry_later, stopping
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.openai.formats import CHAT_URL
from pagemill.producer.openai.responses import RESPONSES_URL

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 32 << 10
FORM_BYTES = 64 << 10
"""Maximum bytes of a form in addition to its file."""
MAX_HELD_BYTES = 256 << 20
"""Maximum bytes of bodies in memory, over all requests. Uploads are written to a temporary file."""
TAKE_IMAGES = (CHAT_URL, RESPONSES_URL, MESSAGES_URL, COUNT_TOKENS_URL)
LINGER_S = 5.0
LINGER_BYTES = 256 << 20
"""Bytes of a rejected body that are still read, so that the client receives the response."""
STATUS_CLIENT_GONE = 499


class ClientGone(Exception):
    """The client has disconnected."""


class RequestLimits:
    """The outermost application. `routes`: the name of each endpoint in the metrics."""

    def __init__(
        self, app: ASGIApp, config: GatewayConfig, metrics: GatewayMetrics, routes: Mapping[object, str]
    ) -> None:
        self.config = config
        self.metrics = metrics
        self.held_bytes = 0
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started = time.monotonic()
        request = LimitedRequest(self, scope, receive, send)
        self.metrics.in_flight += 1
        try:
            await self._answer(request, scope)
        except asyncio.CancelledError:
            # A request is only cancelled at the end of the gateway's drain; the server would respond with 500.
            if request.has_begun:
                raise
            await stopping().response(scope["path"])(scope, request.receive, request.send)
        except Exception:
            # No `except ClientGone`, since the framework wraps exceptions after the start of a response.
            if not request.is_gone:
                logger.exception("a bug ended request %s", request.request_id)
                raise
            request.status = STATUS_CLIENT_GONE
            if (abort := scope.get("state", {}).get("abort")) is not None:
                abort()
                # Lets the connection notice it before the server checks for a response.
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        finally:
            request.release()
            self.metrics.in_flight -= 1
            route = self._routes.get(scope.get("endpoint"), "(none)")
            method = scope["method"] if scope["method"] in _METHODS else "?"
            seconds = time.monotonic() - started
            self.metrics.finished(route, method, request.status, seconds)
            _log(request, method, route, seconds)

    async def _answer(self, request: LimitedRequest, scope: Scope) -> None:
        try:
            # Probes and metrics are served even when the gateway is busy.
            if self.metrics.in_flight > self.config.max_in_flight and scope["path"].startswith(
                ("/v1/", "/jobs/api/")
            ):
                self.metrics.refused["busy"] += 1
                raise retry_later(503, "the gateway has too many requests in progress", "busy")
            request.check_head()
        except ApiError as error:
            await error.response(scope["path"])(scope, request.receive, request.send)
        else:
            await self._app(scope, request.receive, request.send)


def _log(request: LimitedRequest, method: str, route: str, seconds: float) -> None:
    """Write the request's log line: its route, never its path, body or response."""
    level = logging.WARNING if request.status >= 500 else logging.INFO
    logger.log(
        level if route.startswith("/v1/") or route == "(none)" else logging.DEBUG,
        "request",
        extra={
            "method": method,
            "route": route,
            "status": request.status,
            "seconds": round(seconds, 3),
            "request_id": request.request_id,
        },
    )


_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE"})


class LimitedRequest:
    """One request and its response."""

    def __init__(self, limits: RequestLimits, scope: Scope, receive: Receive, send: Send) -> None:
        self.status = STATUS_CLIENT_GONE
        self.is_gone = False
        self.has_begun = False
        """True once the response has started."""
        self._limits = limits
        self._config = limits.config
        self._receive = receive
        self._send = send
        self._started = time.monotonic()
        headers = Headers(scope=scope)
        self._head_bytes = len(scope["path"]) + sum(4 + len(name) + len(value) for name, value in headers.raw)
        length = headers.get("content-length", "")
        self._length = int(length) if length.isdecimal() else 0
        self._is_complete = not (self._length or "transfer-encoding" in headers)
        # A proxy may have used the other header and determined a different end of the body (request smuggling).
        self._is_ambiguous = "transfer-encoding" in headers and "content-length" in headers
        self._encoding = headers.get("content-encoding", "identity").strip().lower()
        self._is_upload = scope["method"] == "POST" and scope["path"].rstrip("/") == "/v1/files"
        config = limits.config
        self._limit = config.max_body_bytes
        if self._is_upload:
            self._limit = config.max_file_bytes + FORM_BYTES
        elif scope["path"].rstrip("/") in TAKE_IMAGES:
            self._limit = max(config.max_body_bytes, config.max_image_body_bytes)
        self._received = 0
        self._held = 0
        self.request_id = f"req_{secrets.token_hex(12)}"

    def check_head(self) -> None:
        """Reject headers that are too long, or that declare a body that is too long, compressed or has two lengths."""
        if self._head_bytes > MAX_HEAD_BYTES:
            raise ApiError(431, f"the request's head has more than {MAX_HEAD_BYTES} bytes", "head_too_large")
        if self._is_ambiguous:
            raise ApiError(400, "content-length and transfer-encoding in one request", "invalid_http")
        if self._length > self._limit:
            raise self._too_large()
        if self._encoding not in ("", "identity") and not self._is_complete:
            message = (
                f"the content encoding {self._encoding[:64]!a} is not supported; send the body uncompressed"
            )
            raise ApiError(415, message, "unsupported_media_type")

    async def receive(self) -> Message:
        """The application's `receive`. Raises ClientGone inside a body, and ApiError: 408, 413, or 503 when all
        bodies together are too large.
        """
        message = await (self._receive_in_time() if self._wants_body() else self._receive())
        if self._wants_body():
            if message["type"] == "http.disconnect":
                self.is_gone = True
                raise ClientGone
            self._count(len(message.get("body", b"")))
        if message["type"] == "http.request":
            self._is_complete = not message.get("more_body", False)
        return message

    def _wants_body(self) -> bool:
        """False once the response has started: a later `receive` only waits for a disconnection."""
        return not (self._is_complete or self.has_begun)

    async def _receive_in_time(self) -> Message:
        allowed = self._config.body_timeout_s + self._received / self._config.min_body_rate
        try:
            async with asyncio.timeout(self._started + allowed - time.monotonic()):
                return await self._receive()
        except TimeoutError:
            if self._wants_body():
                raise ApiError(408, "the request's body comes too slowly", "body_timeout") from None
        return await self._receive()

    async def send(self, message: Message) -> None:
        """The application's `send`. Raises ClientGone when the client stops reading."""
        is_last = message["type"] == "http.response.body" and not message.get("more_body", False)
        if message["type"] == "http.response.start":
            self.status = message["status"]
            self.has_begun = True
            headers = MutableHeaders(scope=message)
            headers["x-request-id"] = headers["request-id"] = (
                self.request_id
            )  # the names of OpenAI and Anthropic
            headers["x-content-type-options"] = "nosniff"
            if not self._is_complete:
                headers["connection"] = "close"
        if is_last and not self._is_complete:
            await self._pass_on({**message, "more_body": True})
            await self._linger()
            message = {"type": "http.response.body", "body": b"", "more_body": False}
        await self._pass_on(message)

    def release(self) -> None:
        self._limits.held_bytes -= self._held
        self._held = 0

    async def _pass_on(self, message: Message) -> None:
        try:
            async with asyncio.timeout(self._config.send_timeout_s):
                await self._send(message)
        except (TimeoutError, OSError):
            self.is_gone = True
            raise ClientGone from None

    async def _linger(self) -> None:
        """Read the rest of the client's data: closing now would lose the response."""
        taken = 0
        try:
            async with asyncio.timeout(LINGER_S):
                while taken < LINGER_BYTES:
                    message = await self._receive()
                    taken += len(message.get("body", b""))
                    if message["type"] != "http.request" or not message.get("more_body", False):
                        break
        except TimeoutError:
            pass
        self._is_complete = True

    def _count(self, size: int) -> None:
        self._received += size
        if self._received > self._limit:
            raise self._too_large()
        if not self._is_upload:
            self._held += size
            self._limits.held_bytes += size
            if self._limits.held_bytes > MAX_HELD_BYTES:
                self._limits.metrics.refused["busy"] += 1
                raise retry_later(503, "the gateway has too many large requests in progress", "busy")

    def _too_large(self) -> ApiError:
        return ApiError(413, f"the request's body has more than {self._limit} bytes", "body_too_large")
