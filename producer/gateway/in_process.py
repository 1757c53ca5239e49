"""The gateway's application without a server, for requests from the same process."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import weakref
from collections.abc import Coroutine
from concurrent.futures import Future
from typing import Any, TypeVar

from starlette.types import ASGIApp, Message, Scope

from pagemill.producer.gateway.app import build_app
from pagemill.producer.gateway.config import GatewayConfig

T = TypeVar("T")

_MAX_MESSAGES = 256
"""Maximum messages of a response that wait for their reader, at least 3; the rest of a stream stays in Redis."""


class InProcessGateway:
    """Runs the application, without batches, on a thread that starts with the first request.

    Threads and event loops may share it. A forked child starts its own thread.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._running: _Running | None = None

    def send(self, scope: Scope, body: bytes, timeout_s: float | None) -> Future[Exchange]:
        """Send a request. The future is a response that has started; it raises as `Exchange.piece` does."""
        running = self._started()
        return running.run(running.send(scope, body, timeout_s))

    def close(self) -> None:
        """Stop all requests, with their jobs, and the thread. A later request starts another."""
        running, self._running = self._running, None
        if running is not None:
            running.close()

    def _started(self) -> _Running:
        running = self._running
        if running is None or running.pid != os.getpid():
            # A lock that was held during a fork is never released in the child.
            lock = self._lock if running is None or running.pid == os.getpid() else threading.Lock()
            with lock:
                running = self._running
                if running is None or running.pid != os.getpid():
                    running = _Running(self._config)
                    weakref.finalize(self, running.close)  # also when the interpreter exits
                    self._lock, self._running = lock, running
        return running


class _Running:
    """The state of one process: the application, and the thread with its event loop."""

    def __init__(self, config: GatewayConfig) -> None:
        self.pid = os.getpid()
        self._app = build_app(config, runs_batches=False)
        self._lifespan: asyncio.Queue[Message] = asyncio.Queue()
        self._open: set[Exchange] = set()
        self._lock = threading.RLock()  # a destructor may run inside `run`
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="pagemill-gateway", daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine on the loop. The future raises ConnectionResetError once that is closed."""
        if self.pid == os.getpid():
            with self._lock:
                if not self._is_closed:
                    return asyncio.run_coroutine_threadsafe(work, self._loop)
        work.close()
        refused: Future[T] = Future()
        refused.set_exception(ConnectionResetError("the client is closed, or belongs to another process"))
        return refused

    async def send(self, scope: Scope, body: bytes, timeout_s: float | None) -> Exchange:
        exchange = Exchange(self, self._app, scope, body)
        self._open.add(exchange)
        exchange.task.add_done_callback(lambda _: self._open.discard(exchange))
        try:
            await exchange.begin(timeout_s)
        except BaseException:
            await exchange.hang_up()
            raise
        return exchange

    def close(self) -> None:
        if self.pid != os.getpid():
            return
        with self._lock:
            is_first, self._is_closed = not self._is_closed, True
        if is_first:
            self._loop.call_soon_threadsafe(self._stop)
        if threading.current_thread() is not self._thread:  # a destructor may run on any thread
            self._thread.join()

    def _stop(self) -> None:
        for exchange in self._open:
            exchange.disconnect()
        self._lifespan.put_nowait({"type": "lifespan.shutdown"})

    def _serve(self) -> None:
        async def ignore(message: Message) -> None:
            pass

        self._lifespan.put_nowait({"type": "lifespan.startup"})
        scope = {"type": "lifespan", "asgi": {"version": "3.0"}}
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._app(scope, self._lifespan.get, ignore))


class Exchange:
    """One request and its response. `piece` and `close` are for any thread, the rest for the gateway's."""

    def __init__(self, running: _Running, app: ASGIApp, scope: Scope, body: bytes) -> None:
        self.status = 0
        self.headers: list[tuple[bytes, bytes]] = []
        self._running = running
        self._body: bytes | None = body
        self._is_gone = asyncio.Event()
        self._is_complete = False
        self._messages: asyncio.Queue[Message | None] = asyncio.Queue(_MAX_MESSAGES)
        self.task = asyncio.create_task(self._answer(app, scope))

    def piece(self, timeout_s: float | None) -> Future[bytes | None]:
        """Return the next part of the response's body, None after the last.

        Raises TimeoutError after `timeout_s` without a part, ConnectionResetError if the response ends early.
        """
        return self._running.run(self._piece(timeout_s))

    def close(self) -> Future[None]:
        """Disconnect, unless the response is complete, and wait until the application has noticed."""
        return self._running.run(self.hang_up())

    async def begin(self, timeout_s: float | None) -> None:
        message = await self._next(timeout_s)
        self.status, self.headers = message["status"], message["headers"]

    async def hang_up(self) -> None:
        self.disconnect()
        await asyncio.wait({self.task})

    def disconnect(self) -> None:
        self._is_gone.set()
        # Senders that wait for space (up to two: a stream and its comments) continue; their next message fails.
        while not self._messages.empty():
            self._messages.get_nowait()
        self._messages.put_nowait(None)

    async def _piece(self, timeout_s: float | None) -> bytes | None:
        if self._is_complete:
            return None
        message = await self._next(timeout_s)
        self._is_complete = not message.get("more_body", False)
        return bytes(message["body"])

    async def _next(self, timeout_s: float | None) -> Message:
        async with asyncio.timeout(timeout_s):
            message = await self._messages.get()
        if message is None:
            raise ConnectionResetError("the answer ended early")
        return message

    async def _answer(self, app: ASGIApp, scope: Scope) -> None:
        with contextlib.suppress(Exception):  # logged, and a 500 response unless one had started
            await app(scope, self._receive, self._send)
        if not self._is_gone.is_set():
            await self._messages.put(None)

    async def _receive(self) -> Message:
        if self._body is not None:
            body, self._body = self._body, None
            return {"type": "http.request", "body": body, "more_body": False}
        await self._is_gone.wait()
        return {"type": "http.disconnect"}

    async def _send(self, message: Message) -> None:
        if self._is_gone.is_set():
            raise ConnectionResetError
        await self._messages.put(message)
