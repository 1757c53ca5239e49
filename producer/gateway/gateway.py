"""The state shared by endpoints: the queue, the API keys and their limits, the models."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from pagemill.producer.client import flows
from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.gateway.api_keys import ApiKey, ApiKeys
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.config import GatewayConfig
from pagemill.producer.gateway.errors import ApiError, retry_later
from pagemill.producer.gateway.guard.limits import ClientGone
from pagemill.producer.gateway.guard.origin import LOOPBACK, check_host, check_origin
from pagemill.producer.gateway.load_signals import LoadSignals
from pagemill.producer.gateway.metrics import GatewayMetrics
from pagemill.producer.gateway.served_models import ServedModels
from pagemill.producer.wire.calls import reads
from pagemill.producer.wire.calls.gateway import rates
from pagemill.producer.wire.calls.gateway.rates import Rate
from pagemill.producer.wire.schema.outputs import Usage
from pagemill.producer.wire.server.scripts import Call

T = TypeVar("T")

CLOSE_S = 10.0
"""Seconds for the final calls of requests and batches, after open requests have had their drain time."""


class Gateway:
    """One gateway, for one event loop. Raises KeyFileError for an invalid key file."""

    def __init__(self, config: GatewayConfig, metrics: GatewayMetrics) -> None:
        self.config = config
        self.metrics = metrics
        self.producer = AsyncProducer(config.redis_url, queue=config.queue)
        self.keys = ApiKeys(config.keys_path)
        self.models = ServedModels(self.producer, config.models)
        self.load = LoadSignals(self.producer, metrics)
        self._in_background: set[asyncio.Task[Any]] = set()

    async def admit(self, request: Request) -> ApiKey:
        """Count the request and return its key. Raises ApiError: 401, 403, or 429 beyond the key's rate."""
        caller = self.identify(request)
        if (bucket := caller.bucket()) is not None:
            await self._take(caller.name, bucket)
        return caller

    async def admit_prompts(self, caller: ApiKey, prompts: int) -> None:
        """Count an admitted request once per prompt. Raises ApiError: 429, or 400 for more than the burst."""
        bucket = caller.bucket()
        if bucket is None or prompts == 1:
            return
        if prompts > bucket.burst:
            message = (
                f"{prompts} prompts count as one request each, and the API key has {bucket.burst} at most"
            )
            raise ApiError(400, message, "too_many_prompts", "prompt")
        await self._take(caller.name, bucket, prompts, returned=1)

    async def _take(self, name: str, bucket: Rate, count: int = 1, returned: int = 0) -> None:
        reply = await self.run(rates.take(self.config.queue, name, bucket, count, returned=returned))
        if not reply.allowed:
            self.metrics.refused["rate"] += 1
            error = retry_later(429, "the API key's rate is used up", "rate_limit_exceeded", reply.wait_s)
            error.headers = dict(error.headers) | {
                "x-ratelimit-limit-requests": str(bucket.burst),
                "x-ratelimit-remaining-requests": str(reply.remaining),
            }
            raise error

    def identify(self, request: Request) -> ApiKey:
        """Return the request's key as `admit` does, without counting."""
        if self.keys.is_open:
            if self.config.host in LOOPBACK:
                check_host(request.headers)
            check_origin(request.method, request.headers)
        headers = request.headers
        key = headers.get("x-api-key")  # used by Anthropic's clients
        return self.keys.identify(headers.get("authorization") or (f"Bearer {key}" if key else None))

    async def run(self, call: Call[T]) -> T:
        """Run a call that is not a method of a handle. Also raises RedisUnavailable after `ANSWER_S`."""
        async with bounded_answer():
            return await self.producer.run_flow(flows.call(call))

    async def now(self) -> float:
        """Return the Redis server's clock in Unix seconds: the clocks of gateways can differ."""
        return await self.run(reads.server_time(self.config.queue))

    def count_tokens(self, usage: Usage) -> None:
        """Add the tokens of a finished request to the metrics."""
        self.metrics.tokens["prompt"] += usage.prompt_tokens
        self.metrics.tokens["completion"] += usage.completion_tokens

    def in_background(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run the coroutine to its end; `close` waits for it."""
        task = asyncio.create_task(work)
        self._in_background.add(task)
        task.add_done_callback(self._in_background.discard)

    async def close(self, batches: asyncio.Task[Any] | None = None) -> None:
        """Stop the batch runner and finish the background work of the last requests, within `CLOSE_S`.

        The server cancels those requests, but does not wait until they have cancelled their jobs.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                if batches is not None:
                    batches.cancel()
                    await asyncio.wait({batches})
                while self.metrics.in_flight:
                    await asyncio.sleep(0.01)
                while self._in_background:
                    await asyncio.wait(self._in_background)
                await self.producer.close()


async def while_connected(request: Request, work: Awaitable[T]) -> T:
    """Return the work's value; the body must have been read. Raises ClientGone if the client disconnects earlier."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        for started in (task, gone):
            started.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
