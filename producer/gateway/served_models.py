"""The available models: those that live workers serve, and those that the operator named.

The queue also *knows* the models that a worker served within a day and those with waiting jobs. Requests for such a
model get 503 while no worker serves it, and requests for other models 404.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Collection
from typing import Literal

from pydantic import BaseModel

from pagemill.producer.client import flows
from pagemill.producer.client.aio import AsyncProducer
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.errors import ApiError, retry_later
from pagemill.producer.wire.calls import registry
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys

FRESH_S = 1.0
REMEMBERED_S = 60.0
"""Enough time to replace a worker; until then its model's jobs are accepted and wait."""
KNOWN_FRESH_S = 2.0
MAX_LANE_PAGES = 20
"""Maximum pages of a thousand lanes that are searched for models with waiting jobs."""


class Model(BaseModel):
    """The model object that clients receive."""

    id: str
    object: Literal["model"]
    created: int
    owned_by: str


def _not_ready() -> ApiError:
    return retry_later(503, "no worker is ready for the model", "no_worker", 5.0)


def _model(name: str, created: int) -> Model:
    return Model(id=name, object="model", created=created, owned_by="pagemill")


class ServedModels:
    """The models of a queue. Reads it at most once per second, and before rejecting a name."""

    def __init__(self, producer: AsyncProducer, named: tuple[str, ...]) -> None:
        self._producer = producer
        self._started = int(time.time())
        self._named = {name: _model(name, self._started) for name in named}
        self._seen: dict[str, tuple[Model, float]] = {}
        self._lengths: dict[str, int] = {}
        self._adapters: dict[str, tuple[str, Model, float]] = {}
        """Maps a name to the model for which workers have the adapter."""
        self._are_loading = False
        self.has_ready_worker = False
        self._looked_at = -math.inf
        self._known: dict[str, dict[str, str]] = {}
        """Maps names without a live worker that the queue knows to the fields of a job for them."""
        self._known_until = 0.0
        self._lock = asyncio.Lock()

    async def all(self, caller: ApiKey) -> list[Model]:
        """Return the models that the caller may use, sorted by name."""
        arrived = time.monotonic()
        await self.refresh()
        if not (self._named or self._seen):
            await self.refresh(arrived)
        known = {name: model for name, (_, model, _) in self._adapters.items()}
        known |= self._named | {name: model for name, (model, _) in self._seen.items()}
        return [known[name] for name in sorted(known) if caller.allows(name)]

    async def resolve(self, name: str, caller: ApiKey) -> dict[str, str]:
        """Return the fields of a job for a model, or for an adapter, that the caller may use. Raises as `check`."""
        if caller.allows(name) and name not in self._named:
            await self._find(name)
            if found := self.adapted(name):
                return found
            if "adapter" in (await self.known([name])).get(name, {}):
                raise _not_ready()
        await self.check(name, caller)
        return {"model": name}

    def adapted(self, name: str) -> dict[str, str]:
        """Return the fields of a job for an adapter as last seen; empty: no model is hidden by that name."""
        if name in self._named or name in self._seen or name not in self._adapters:
            return {}
        return {"model": self._adapters[name][0], "adapter": name}

    def is_served(self, name: str) -> bool:
        """Return whether a worker served the model or adapter within the last minute, as last seen."""
        return name in self._seen or name in self._adapters

    def max_model_len(self, name: str) -> int | None:
        """Return the maximum tokens of a model, as last seen; None: unknown."""
        return self._lengths.get(name)

    async def known(self, names: Collection[str]) -> dict[str, dict[str, str]]:
        """Return the fields of a job for each of these models and adapters that the queue knows."""
        await self.refresh()
        found: dict[str, dict[str, str]] = {}
        for name in names:
            if name in self._named or name in self._seen:
                found[name] = {"model": name}
            elif fields := self.adapted(name):
                found[name] = fields
        if len(found) < len(names):
            await self._refresh_known()
            found = {name: self._known[name] for name in names if name in self._known} | found
        return found

    async def check(self, name: str, caller: ApiKey) -> None:
        """Raise ApiError unless the caller may use the model: 403, 404, or 503 while no worker serves it."""
        if not caller.allows(name):
            raise ApiError(403, f"the API key may not use the model {name!a}", "model_not_allowed", "model")
        if name in self._named:
            return
        await self._find(name)
        if name in self._seen:
            return
        if not self._seen or self._are_loading or {"model": name} in (await self.known([name])).values():
            raise _not_ready()
        raise ApiError(404, f"the model {name!a} does not exist", "model_not_found", "model")

    def _adapters_of(self, workers: list[WorkerInfo], now: float) -> dict[str, tuple[str, Model, float]]:
        """Return the adapters of live workers; if one has several models, those of the first by name."""
        kept = {name: seen for name, seen in self._adapters.items() if now - seen[2] < REMEMBERED_S}
        served = {model for worker in workers for model in worker.models}
        # A live worker announces its adapters; only the adapters of a model without workers are kept.
        found = {name: seen for name, seen in kept.items() if seen[0] not in served}
        for worker in sorted(workers, key=lambda worker: worker.models, reverse=True):
            if worker.models:
                for name in worker.adapters:
                    found[name] = (worker.models[0], _model(name, int(worker.started_at)), now)
        return found

    async def find(self, name: str, caller: ApiKey) -> Model | None:
        """Return a model that the caller may use; None if there is none by that name."""
        await self._find(name)
        return next((model for model in await self.all(caller) if model.id == name), None)

    async def _find(self, name: str) -> None:
        """Read the queue; once more if it does not have the model, since its worker may have registered meanwhile."""
        arrived = time.monotonic()
        await self.refresh()
        if not self.is_served(name):
            await self.refresh(arrived)

    async def refresh(self, since: float | None = None) -> None:
        """Read the queue, unless it was read after `since` (monotonic). Default: a moment ago."""
        since = time.monotonic() - FRESH_S if since is None else since
        if self._looked_at >= since:
            return
        async with bounded_answer(), self._lock:
            if self._looked_at >= since:
                return
            began = time.monotonic()
            workers: list[WorkerInfo] = await self._producer.run_flow(
                flows.call(registry.workers(self._producer.queue))
            )
            now = time.monotonic()
            for worker in workers:
                for name in worker.models:
                    self._seen[name] = (_model(name, int(worker.started_at)), now)
                    if worker.max_model_len is not None:
                        self._lengths[name] = worker.max_model_len
            self._adapters = self._adapters_of(workers, now)
            self._seen = {name: seen for name, seen in self._seen.items() if now - seen[1] < REMEMBERED_S}
            self._lengths = {name: length for name, length in self._lengths.items() if name in self._seen}
            self._are_loading = any(worker.state == "loading" for worker in workers)
            self.has_ready_worker = any(worker.state == "ready" for worker in workers)
            self._looked_at = began

    async def _refresh_known(self) -> None:
        """Read which models were served recently or have waiting jobs, unless they were read a moment ago."""
        if time.monotonic() < self._known_until:
            return
        async with bounded_answer(), self._lock:
            if time.monotonic() < self._known_until:
                return
            lately: list[str] = await self._producer.run_flow(
                flows.call(registry.served(self._producer.queue))
            )
            names = set(lately)
            cursor = "0"
            for _ in range(MAX_LANE_PAGES):
                page = await self._producer.run_flow(
                    flows.call(registry.stats_page(self._producer.queue, cursor))
                )
                names |= {keys.split_lane(lane)[3] for lane in page.lanes}
                cursor = page.cursor
                if cursor == "0":
                    break
            known: dict[str, dict[str, str]] = {}
            # As for live workers: a model hides an adapter of its name; an adapter belongs to the first model by name.
            for name in sorted(sorted(names, reverse=True), key=lambda name: "#" not in name):
                model, _, adapter = name.partition("#")
                known[adapter or model] = {"model": model} | ({"adapter": adapter} if adapter else {})
            self._known, self._known_until = known, time.monotonic() + KNOWN_FRESH_S
