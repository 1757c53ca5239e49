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
        self._adapters: dict[str, tuple[str, Model, float]] = {}
        """Name -> the model that workers have it for."""
        self._are_loading = False
        self._fresh_until = 0.0
        self._lock = asyncio.Lock()

    async def all(self, caller: ApiKey) -> list[Model]:
        """Return the models that the caller may use, sorted by name."""
        await self.look()
        known = {name: model for name, (_, model, _) in self._adapters.items()}
        known |= self._named | {name: model for name, (model, _) in self._seen.items()}
        return [known[name] for name in sorted(known) if caller.allows(name)]

    async def resolve(self, name: str, caller: ApiKey) -> dict[str, str]:
        """Return the fields of a job for a model, or for an adapter, that the caller may use. Raises as `check`."""
        if caller.allows(name) and name not in self._named:
            await self.look()
            if found := self.adapted(name):
                return found
        await self.check(name, caller)
        return {"model": name}

    def adapted(self, name: str) -> dict[str, str]:
        """Return the fields of a job for an adapter as last seen; empty: no model is hidden by that name."""
        if name in self._named or name in self._seen or name not in self._adapters:
            return {}
        return {"model": self._adapters[name][0], "adapter": name}

    async def check(self, name: str, caller: ApiKey) -> None:
        """Raise ApiError unless the caller may use the model: 403, 404, or 503 while no worker is ready."""
        if not caller.allows(name):
            raise ApiError(403, f"the API key may not use the model {name!a}", "model_not_allowed", "model")
        if name in self._named:
            return
        await self.look()
        if name in self._seen:
            return
        if not self._seen or self._are_loading:
            raise retry_later(503, "no worker is ready", "no_worker", 5.0)
        raise ApiError(404, f"the model {name!a} does not exist", "model_not_found", "model")

    def _adapters_of(self, workers: list[WorkerInfo], now: float) -> dict[str, tuple[str, Model, float]]:
        """Return the adapters of live workers; of one with several models, the first by name."""
        kept = {name: seen for name, seen in self._adapters.items() if now - seen[2] < REMEMBERED_S}
        served = {model for worker in workers for model in worker.models}
        # A live worker that no longer has one has been told so; only the adapters of a model that is away are kept.
        found = {name: seen for name, seen in kept.items() if seen[0] not in served}
        for worker in sorted(workers, key=lambda worker: worker.models, reverse=True):
            if worker.models:
                for name in worker.adapters:
                    found[name] = (worker.models[0], _model(name, int(worker.started_at)), now)
        return found

    async def look(self) -> None:
        """Ask the queue, unless it was asked a moment ago."""
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
            self._adapters = self._adapters_of(workers, now)
            self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < REMEMBERED_S}
            self._are_loading = any(worker.state == "loading" for worker in workers)
            self._fresh_until = now + FRESH_S
