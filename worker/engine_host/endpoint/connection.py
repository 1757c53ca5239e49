"""HTTP client of an endpoint: a connection pool, bounded responses, and errors classified by remedy.

Errors never contain the key, the prompt or the response.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any, Self

import httpx2

from pagemill.engine.errors import EngineError

CONNECT_S = 5.0
ANSWER_S = 10.0
"""Maximum seconds of a request outside a job."""
KEEPALIVE_S = 3.0
"""Below the 5 s after which common servers close an idle connection."""
MAX_LINE_BYTES = 1 << 20
"""Maximum length of a line of a stream."""
MAX_BODY_BYTES = 8 << 20
"""Maximum size of a response outside a stream."""
MAX_RETRY_AFTER_S = 60.0
_DEFAULT_RETRY_S = 1.0
_UNAVAILABLE = frozenset({401, 403, 404, 408, 429, 502, 503, 504})
_CODE = re.compile(r"[A-Za-z0-9_.-]{1,64}")


class Unavailable(EngineError):
    """The endpoint does not accept requests now: it is down, loading, overloaded, or rejects the key."""

    def __init__(
        self, message: str, status: int | None = None, retry_after_s: float = _DEFAULT_RETRY_S
    ) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class Interrupted(EngineError):
    """The connection broke, or the response ended early, after the endpoint had received the request."""


class BadAnswer(EngineError):
    """The endpoint failed to process the request, or its response violates the interface."""


class Refused(EngineError):
    """The endpoint rejects the request itself."""

    def __init__(self, status: int, code: str) -> None:
        """`code`: the error's code or type, if it is a single word."""
        super().__init__(f"the engine rejects the request (HTTP {status}{', ' + code if code else ''})")
        self.status = status
        self.reason = code


class Connection:
    """A client of one endpoint. Used in one event loop."""

    def __init__(self, url: str, key: str = "") -> None:
        """`url`: the address that ends in `/v1`, in the form that OpenAI's clients use."""
        self._url = url.rstrip("/")
        self._root = self._url.removesuffix("/v1")
        headers = {"accept-encoding": "identity"} | ({"authorization": f"Bearer {key}"} if key else {})
        self._client = httpx2.AsyncClient(
            headers=headers,
            timeout=httpx2.Timeout(None, connect=CONNECT_S),
            limits=httpx2.Limits(keepalive_expiry=KEEPALIVE_S),
            trust_env=False,
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._client.aclose()

    async def get(self, path: str, *, at_root: bool = False) -> bytes:
        """Return a body. Raises the subclasses of `EngineError` above; an interruption raises `Unavailable`.

        `at_root`: the path is next to `/v1`, not below it.
        """
        return await self._bounded("GET", (self._root if at_root else self._url) + path)

    async def get_json(self, path: str, *, at_root: bool = False) -> dict[str, Any]:
        """Return a JSON object. Raises as `get`."""
        return _object(await self.get(path, at_root=at_root))

    async def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send a JSON object and return that of the response. Raises as `get`."""
        return _object(await self._bounded("POST", self._url + path, json.dumps(body).encode()))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any]]:
        """Send a streaming request and yield its events. Closing the generator ends the request.

        Raises: the subclasses of `EngineError` above.
        """
        try:
            async with self._client.stream(
                "POST",
                self._url + path,
                content=json.dumps(body).encode(),
                headers={"content-type": "application/json"},
            ) as response:
                if response.status_code != 200:
                    raise await _error(response)
                async for line in _lines(response.aiter_bytes()):
                    if not line.startswith(b"data:"):
                        continue
                    data = line.removeprefix(b"data:").strip()
                    if data == b"[DONE]":
                        return
                    yield _object(data)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            raise Unavailable(f"the engine cannot be reached: {type(error).__name__}") from None
        except httpx2.HTTPError as error:
            raise Interrupted(f"the connection to the engine broke: {type(error).__name__}") from None

    async def _bounded(self, method: str, url: str, content: bytes | None = None) -> bytes:
        headers = {} if content is None else {"content-type": "application/json"}
        try:
            async with (
                asyncio.timeout(ANSWER_S),
                self._client.stream(method, url, content=content, headers=headers) as response,
            ):
                if response.status_code != 200:
                    raise await _error(response)
                return await _body(response, MAX_BODY_BYTES)
        except TimeoutError:
            raise Unavailable(f"the engine did not answer within {ANSWER_S:g} s") from None
        except httpx2.HTTPError as error:
            raise Unavailable(f"the engine cannot be reached: {type(error).__name__}") from None


def _object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise BadAnswer("the engine's response is not JSON") from None
    if not isinstance(value, dict):
        raise BadAnswer("the engine's response is not a JSON object")
    return value


async def _lines(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = bytearray()
    async for piece in pieces:
        *ended, last = piece.split(b"\n")
        for line in ended:
            rest += line
            _check_line(rest)
            yield bytes(rest)
            rest.clear()
        rest += last
        _check_line(rest)


def _check_line(line: bytearray) -> None:
    if len(line) > MAX_LINE_BYTES:
        raise BadAnswer(f"a line of the engine's response has more than {MAX_LINE_BYTES} bytes")


async def _body(response: httpx2.Response, limit: int) -> bytes:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > limit:
            raise BadAnswer(f"the engine's response has more than {limit} bytes")
    return bytes(body)


async def _error(response: httpx2.Response) -> EngineError:
    status = response.status_code
    if status in _UNAVAILABLE:
        return Unavailable(f"the engine answers HTTP {status}", status, _retry_after(response))
    if not 400 <= status < 500:
        return BadAnswer(f"the engine answers HTTP {status}")
    try:
        error = _object(await _body(response, MAX_LINE_BYTES)).get("error")
    except BadAnswer:
        error = None
    words = [error.get("code"), error.get("type")] if isinstance(error, dict) else []
    code = next((word for word in words if isinstance(word, str) and _CODE.fullmatch(word)), "")
    return Refused(status, code)


def _retry_after(response: httpx2.Response) -> float:
    try:
        seconds = float(response.headers.get("retry-after", ""))
    except ValueError:
        return _DEFAULT_RETRY_S
    return min(max(seconds, 0.0), MAX_RETRY_AFTER_S) if seconds == seconds else _DEFAULT_RETRY_S
