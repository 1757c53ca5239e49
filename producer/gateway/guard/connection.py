"""Connections with a deadline for each request's header; idle ones are closed to make room for new ones."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import h11
from uvicorn import Config
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.server import ServerState

from pagemill.producer.gateway.errors import ApiError
from pagemill.producer.gateway.metrics import GatewayMetrics


class ConnectionLimits:
    """State shared by one gateway's connections: those that wait for a request, longest first."""

    def __init__(self, max_connections: int, head_timeout_s: float, metrics: GatewayMetrics) -> None:
        self.max_connections = max_connections
        self.head_timeout_s = head_timeout_s
        self.metrics = metrics
        self.idle: dict[GuardedConnection, None] = {}

    def protocol(self) -> type[GuardedConnection]:
        """Return the protocol class for uvicorn, bound to these limits."""
        limits = self

        class Connection(GuardedConnection):
            def __init__(self, *args: Any, **options: Any) -> None:
                super().__init__(limits, *args, **options)

        return Connection


class GuardedConnection(H11Protocol):
    """One connection. Its requests find `abort`, which closes it immediately, in their scope's state."""

    def __init__(
        self,
        limits: ConnectionLimits,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state | {"abort": self.abort}, _loop)
        self._limits = limits
        self._head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        super().connection_made(transport)
        self._limits.metrics.connections = len(self.connections)
        if len(self.connections) > self._limits.max_connections and self._limits.idle:
            next(iter(self._limits.idle)).abort()
        self._limits.idle[self] = None
        self._expect_head()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if self._is_waiting():
            self._expect_head()
        else:
            self._limits.idle.pop(self, None)
            self._stop_timer()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._is_waiting() and not self.transport.is_closing():
            self._limits.idle[self] = None

    def connection_lost(self, exc: Exception | None) -> None:
        self._limits.idle.pop(self, None)
        self._stop_timer()
        super().connection_lost(exc)
        self._limits.metrics.connections = len(self.connections)

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed HTTP in the common error format."""
        self._limits.metrics.finished("(malformed)", "?", 400, 0.0)
        body = json.dumps(ApiError(400, "the request is not valid HTTP", "invalid_http").body()).encode()
        headers = [
            (b"content-type", b"application/json"),
            (b"content-length", str(len(body)).encode()),
            (b"connection", b"close"),
        ]
        is_in_body = not self._is_waiting()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            shown = b"" if is_in_body and self.scope["method"] == "HEAD" else body
            for event in (
                h11.Response(status_code=400, headers=headers),
                h11.Data(shown),
                h11.EndOfMessage(),
            ):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()
        if is_in_body:
            # This was the response to the request, which must not start another one.
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def abort(self) -> None:
        """Close the connection without sending pending data."""
        self._limits.idle.pop(self, None)
        if self.transport is not None:
            self.transport.abort()

    def _is_waiting(self) -> bool:
        return self.cycle is None or self.cycle.response_complete

    def _expect_head(self) -> None:
        """Start the timer for the request's header, unless it is running: further bytes do not extend it."""
        if self._head_timer is None:
            self._head_timer = self._later(self._limits.head_timeout_s, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        if self._is_waiting():
            self.abort()

    def _later(self, seconds: float, then: Callable[[], None]) -> asyncio.TimerHandle:
        return self.loop.call_later(seconds, then)

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None
