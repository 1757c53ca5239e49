"""OpenAI's Python client on the queue: its calls become jobs, without a gateway between.

    from pagemill.openai import OpenAI  # instead of: from openai import OpenAI

    client = OpenAI()
    client.chat.completions.create(model="smollm2", messages=[{"role": "user", "content": "Hi"}])

The gateway's application answers the requests in the same process.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, TypeVar

try:
    import openai

    from pagemill.producer.gateway.config import DAY_S, GatewayConfig
    from pagemill.producer.gateway.in_process import Exchange, InProcessGateway
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"pagemill.openai requires {error.name}: pip install 'pagemill[openai]'", name=error.name
    ) from error

from pagemill.producer.wire.schema.errors import PagemillError
from pagemill.producer.wire.server.clients import ServerAddress
from pagemill.producer.wire.server.discovery import find_redis

if TYPE_CHECKING:
    import httpx2 as httpx
else:  # openai 3 is built on httpx2, openai 2 on httpx
    httpx = importlib.import_module(openai.DefaultHttpxClient.__mro__[1].__module__.partition(".")[0])

__all__ = ["AsyncOpenAI", "OpenAI"]

_BASE_URL = "http://localhost/v1"
"""The paths of the gateway. Nothing resolves the host's name."""
T = TypeVar("T")


class OpenAI(openai.OpenAI):
    """`openai.OpenAI`, whose requests become jobs.

    Connects on the first request, on a thread that `close` ends. Threads may share it; a forked child gets a thread and
    connections of its own. Jobs belong to the tenant `default`.
    """

    def __init__(
        self,
        *,
        redis_url: str | None = None,
        queue: str = "default",
        base_url: Any = None,
        http_client: httpx.Client | None = None,
        api_key: Any = None,
        **options: Any,
    ) -> None:
        """Create a client.

        Args:
            redis_url: address of the queue's server; without it, as in Producer, PAGEMILL_REDIS_URL or the server of a
                local worker.
            queue: name of the queue.
            base_url: has no effect, like `api_key`, `organization` and `project`.
            http_client: of another such client, as `with_options` passes it; no other.
            api_key: has no effect.
            options: those of `openai.OpenAI`.

        Raises:
            openai.OpenAIError: there is no server, its address is invalid, or `http_client` is of another kind.
        """
        if http_client is None:
            http_client = _Client(transport=_Transport(_gateway(redis_url, queue)))
        elif not isinstance(http_client, _Client):
            raise _unsupported_http_client()
        super().__init__(api_key=api_key or "none", base_url=_BASE_URL, http_client=http_client, **options)


class AsyncOpenAI(openai.AsyncOpenAI):
    """`openai.AsyncOpenAI`, like OpenAI. Event loops may share it."""

    def __init__(
        self,
        *,
        redis_url: str | None = None,
        queue: str = "default",
        base_url: Any = None,
        http_client: httpx.AsyncClient | None = None,
        api_key: Any = None,
        **options: Any,
    ) -> None:
        """Create a client.

        Args:
            redis_url: address of the queue's server; without it, as in Producer, PAGEMILL_REDIS_URL or the server of a
                local worker.
            queue: name of the queue.
            base_url: has no effect, like `api_key`, `organization` and `project`.
            http_client: of another such client, as `with_options` passes it; no other.
            api_key: has no effect.
            options: those of `openai.AsyncOpenAI`.

        Raises:
            openai.OpenAIError: there is no server, its address is invalid, or `http_client` is of another kind.
        """
        if http_client is None:
            http_client = _AsyncClient(transport=_AsyncTransport(_gateway(redis_url, queue)))
        elif not isinstance(http_client, _AsyncClient):
            raise _unsupported_http_client()
        super().__init__(api_key=api_key or "none", base_url=_BASE_URL, http_client=http_client, **options)


class _Client(openai.DefaultHttpxClient):
    pass


class _AsyncClient(openai.DefaultAsyncHttpxClient):
    pass


def _unsupported_http_client() -> openai.OpenAIError:
    return openai.OpenAIError("http_client is not supported: requests go to the queue, not over HTTP")


def _gateway(redis_url: str | None, queue: str) -> InProcessGateway:
    """Prepare a gateway. Raises OpenAIError."""
    try:
        ServerAddress.parse(find_redis(redis_url))
        # A reader in the same process may take its time.
        return InProcessGateway(GatewayConfig(redis_url=redis_url, queue=queue, send_timeout_s=DAY_S))
    except (PagemillError, ValueError) as error:
        raise openai.OpenAIError(str(error)) from error


class _Transport(httpx.BaseTransport):
    def __init__(self, gateway: InProcessGateway) -> None:
        self._gateway = gateway

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body, timeout_s = request.read(), _timeout_s(request)
        with _translated(request):
            exchange = _wait(self._gateway.send(_scope(request), body, timeout_s))
        stream = _Stream(self._gateway, exchange, request)
        return httpx.Response(exchange.status, headers=exchange.headers, stream=stream)

    def close(self) -> None:
        self._gateway.close()


class _AsyncTransport(httpx.AsyncBaseTransport):
    def __init__(self, gateway: InProcessGateway) -> None:
        self._gateway = gateway

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        body, timeout_s = await request.aread(), _timeout_s(request)
        with _translated(request):
            exchange = await asyncio.wrap_future(self._gateway.send(_scope(request), body, timeout_s))
        stream = _AsyncStream(self._gateway, exchange, request)
        return httpx.Response(exchange.status, headers=exchange.headers, stream=stream)

    async def aclose(self) -> None:
        await asyncio.to_thread(self._gateway.close)


class _Stream(httpx.SyncByteStream):
    def __init__(self, gateway: InProcessGateway, exchange: Exchange, request: httpx.Request) -> None:
        self._gateway = gateway  # kept alive
        self._exchange = exchange
        self._request = request

    def __iter__(self) -> Iterator[bytes]:
        timeout_s = _timeout_s(self._request)
        with _translated(self._request):
            while (piece := _wait(self._exchange.piece(timeout_s))) is not None:
                yield piece

    def close(self) -> None:
        with suppress(ConnectionResetError):  # the client was closed first
            _wait(self._exchange.close())


class _AsyncStream(httpx.AsyncByteStream):
    def __init__(self, gateway: InProcessGateway, exchange: Exchange, request: httpx.Request) -> None:
        self._gateway = gateway  # kept alive
        self._exchange = exchange
        self._request = request

    async def __aiter__(self) -> AsyncIterator[bytes]:
        timeout_s = _timeout_s(self._request)
        with _translated(self._request):
            while True:
                piece = await asyncio.wrap_future(self._exchange.piece(timeout_s))
                if piece is None:
                    return
                yield piece

    async def aclose(self) -> None:
        with suppress(ConnectionResetError):
            await asyncio.wrap_future(self._exchange.close())


def _wait(future: Future[T]) -> T:
    """Return the future's value; an interrupt cancels its work."""
    try:
        return future.result()
    except BaseException:
        future.cancel()
        raise


@contextmanager
def _translated(request: httpx.Request) -> Iterator[None]:
    """Raise errors of an exchange as those of httpx, which openai turns into its own."""
    try:
        yield
    except TimeoutError as error:
        raise httpx.ReadTimeout("no answer within the timeout", request=request) from error
    except OSError as error:
        raise httpx.ReadError(str(error), request=request) from error


def _timeout_s(request: httpx.Request) -> float | None:
    timeout_s: float | None = request.extensions.get("timeout", {}).get("read")
    return timeout_s


def _scope(request: httpx.Request) -> dict[str, Any]:
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": request.method,
        "scheme": request.url.scheme,
        "path": request.url.path,
        "raw_path": request.url.raw_path.partition(b"?")[0],
        "query_string": request.url.query,
        "root_path": "",
        "headers": [(name.lower(), value) for name, value in request.headers.raw],
        "client": None,
        "server": None,
    }
