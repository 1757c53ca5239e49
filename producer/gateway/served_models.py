"""The available models: those that live workers serve, and those that the operator named."""

from __future__ import annotations

import asyncio
import time
from typing import Literal

from pydantic import BaseModel

from pagemill.producer.client import flows
from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.errors import ApiError, retry_later
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo

FRESH_S = 1.0
REMEMBERED_S = 60.0
"""Enough to replace a worker; until then its model's jobs are accepted and wait."""


class Model(BaseModel):
    """A model as clients see it."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


def _model(name: str, created: int) -> Model:
    return Model(id=name, object="model", created=created, owned_by="pagemill")


class ServedModels:
    """The models of a queue; asks it at most once a second, regardless of the number of requests."""

    def __init__(self, producer: AsyncProducer, named: tuple[str, ...]) -> None:
        self._producer = producer
        self._started = int(time.time())
        self._named = {name: _model(name, self._started) for name in named}
        self._seen: dict[str, tuple[Model, float]] = {}
        self._are_loading = False
        self._fresh_until = 0.0
        self._lock = asyncio.Lock()

    async def all(self, caller: ApiKey) -> list[Model]:
        """Return the models that the caller may use, sorted by name."""
        await self._look()
        known = self._named | {name: model for name, (model, _) in self._seen.items()}
        return [known[name] for name in sorted(known) if caller.allows(name)]

    async def check(self, name: str, caller: ApiKey) -> None:
        """Raise ApiError unless the caller may use the model: 403, 404, or 503 while no worker is ready."""
        if not caller.allows(name):
            raise ApiError(403, f"the API key may not use the model {name!a}", "model_not_allowed", "model")
        if name in self._named:
            return
        await self._look()
        if name in self._seen:
            return
        if not self._seen or self._are_loading:
            raise retry_later(503, "no worker is ready", "no_worker", 5.0)
        raise ApiError(404, f"the model {name!a} does not exist", "model_not_found", "model")

    async def _look(self) -> None:
        if time.monotonic() < self._fresh_until:
            return
        async with self._lock:
            if time.monotonic() < self._fresh_until:
                return
            workers: list[WorkerInfo] = await self._producer.run_flow(
                flows.call(registry.workers(self._producer.queue))
            )
            now = time.monotonic()
            for worker in workers:
                for name in worker.models:
                    self._seen[name] = (_model(name, int(worker.started_at)), now)
            self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < REMEMBERED_S}
            self._are_loading = any(worker.state == "loading" for worker in workers)
            self._fresh_until = now + FRESH_S
