"""The responses to a batch's requests: two files that grow in the order in which the requests end.

The queue keeps that order, so that a gateway that takes over the batch writes the same files.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from pagemill.producer.client import flows
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.gateway.batches.stored_lines import StoredLines
from pagemill.producer.gateway.errors import in_openai_words
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.openai.lines import BatchAnswers, BatchRequest, BatchRequests, BatchSummary
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.schema.outputs import BatchItem

GROW_S = 1.0
"""Seconds between two checks for requests that have ended."""
_FULL = Failure("output_too_large", "the tenant's files leave no room for it: delete some, and send it again")


class GrowingAnswers:
    """The output and the errors of one batch. A context manager, which closes the spools of both."""

    def __init__(
        self,
        gateway: Gateway,
        tenant: str,
        batch_id: str,
        about: dict[str, Any],
        requests: BatchRequests,
        file_id: Callable[[str], str],
    ) -> None:
        """`about`: the batch's record. `file_id`: returns the id of the `output` or the `error` file."""
        self._gateway = gateway
        self._queue = gateway.config.queue
        self._tenant = tenant
        self._id = batch_id
        self._about = about
        self._requests = requests
        self._output_id = file_id("output")
        self._output, self._errors = (
            StoredLines(gateway, tenant, file_id(kind), f"{batch_id}_{kind}.jsonl")
            for kind in ("output", "error")
        )
        self._answers = BatchAnswers(self._output, self._errors)
        self._places = requests.places()
        self._is_answered = bytearray(len(self._places))
        self._position = 0
        self._room = 0
        self._looked_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._output.__exit__(kind, error, trace)
        self._errors.__exit__(kind, error, trace)

    async def resume(self) -> None:
        """Start with the output of an earlier run of the batch."""
        await self._output.resume()

    async def grow(self, *, at_once: bool = False) -> str | None:
        """Add the requests that have ended, at most once per `GROW_S`; returns the output's id once there is one."""
        if not at_once and time.monotonic() < self._looked_at + GROW_S:
            return None
        self._looked_at = time.monotonic()
        self._room = await self._read_room()
        while True:
            flow = flows.page(self._queue, self._id, self._position, ordered=False)
            page = await self._gateway.producer.run_flow(flow)
            if page.position == self._position:
                break
            self._position = page.position
            await asyncio.to_thread(self._add_all, page.items)
        return await self._output.grow(float(self._about["expires_at"]) + float(self._about["output_ttl_s"]))

    async def finish(
        self, unsubmitted: Callable[[BatchRequest], Failure]
    ) -> tuple[BatchSummary, str | None, str | None]:
        """Respond to all other requests with `unsubmitted`; returns the counts and the ids of both files."""
        await self.grow(at_once=True)
        await asyncio.to_thread(self._add_unsubmitted, unsubmitted)
        ttl_s = float(self._about["output_ttl_s"])
        return self._answers.summary, await self._output.store(ttl_s), await self._errors.store(ttl_s)

    def _add_all(self, items: list[BatchItem]) -> None:
        for item in items:
            number = int(item.key)
            if not self._is_answered[number - 1]:
                self._add(self._requests.at(self._places[number - 1], number), self._end(item))

    def _add_unsubmitted(self, unsubmitted: Callable[[BatchRequest], Failure]) -> None:
        for request in self._requests:
            if not self._is_answered[request.number - 1]:
                self._add(request, unsubmitted(request))

    def _add(self, request: BatchRequest, end: dict[str, Any] | Failure) -> None:
        is_full = self._output.size > self._room and not isinstance(end, Failure)
        name = f"{self._id[6:]}{request.number:08d}"[-24:]
        self._answers.add(request, name, _FULL if is_full else end)
        self._is_answered[request.number - 1] = 1

    async def _read_room(self) -> int:
        """Return the maximum bytes of the output: the tenant's files, including it, may have twice the quota."""
        files = await self._gateway.run(stored_files.find_all(self._queue, self._tenant))
        others = sum(file.size for file in files if file.id != self._output_id)
        return max(0, 2 * self._gateway.config.max_tenant_bytes - others)

    def _end(self, item: BatchItem) -> dict[str, Any] | Failure:
        if item.result is not None:
            fields = {"outputs", "prompt_logprobs", "usage", "model", "rows", "labels"}
            return item.result.model_dump(include=fields) | {"created": int(self._about["created_at"])}
        if item.error is None:
            return Failure(item.state, f"the job is {item.state}", True)
        return Failure(*in_openai_words(item.error.code, item.error.message), item.error.retryable)
