"""/v1/responses/{id}: responses whose jobs run in the background, and stored ones.

A background response is a job without a waiter: it does not depend on any connection or gateway. All later reads use
the job's record.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.client import flows
from pagemill.producer.client.aio_handles import AsyncJobHandle
from pagemill.producer.client.effects import Flow
from pagemill.producer.client.replay.flow import submitted_job
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.errors import ApiError, JsonResponse, as_api_error, error_body, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.request_parsing import ParsedRequest, request_of
from pagemill.producer.gateway.responses import ResponseStream
from pagemill.producer.gateway.streaming import EventStream, TextDelta, diverged
from pagemill.producer.openai import responses, stored_responses
from pagemill.producer.wire.calls import purge, reads
from pagemill.producer.wire.calls.reads import Outcome, Recorded
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import JobError, PagemillError, ResultTimeout, Unverifiable
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import JobStatus, Output, PositionLogprobs

_CANCEL_S = 2.0
"""Seconds that a cancellation waits for the worker, so that its response shows the end."""
_STATUS: Mapping[str, str] = {
    "queued": "queued",
    "delayed": "queued",
    "running": "in_progress",
    "cancelled": "cancelled",
}
"""Status by the job's state; the other states without a result are failed."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored response: its job's record, and the request that the job represents."""

    job: Job
    status: JobStatus
    asked: dict[str, Any]
    outcome: Outcome

    @property
    def is_background(self) -> bool:
        return self.asked.get("background") is True

    def body(self, state: str | None = None) -> dict[str, Any]:
        """Return the response's JSON. `state`: of the job, if it is newer than the record's."""
        return responses.response(
            self.asked,
            self.status.id,
            int(self.status.created_at),
            self.outcome.result,
            status=_STATUS.get(state or self.status.state, "failed"),
            completed=self.status.finished_at,
            error=self._error() if state is None else None,
        )

    def _error(self) -> dict[str, str] | None:
        error = self.outcome.error
        if error is not None and self.status.state != "cancelled":
            return error_body(error.code, error.message)
        if self.outcome.state == "succeeded" and self.outcome.result is None:
            return {"code": "result_gone", "message": "the result has been removed"}
        return None


class StoredResponses:
    """Endpoints of stored responses. A key sees those of its tenant with models that it may use."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._queue = gateway.config.queue

    async def retrieve(self, request: Request) -> Response:
        """Return the response, or with `stream=true` its events after `starting_after`."""
        caller = await self._gateway.admit(request)
        after = _starting_after(request)
        found = await self._find(str(request.path_params["response_id"]), caller)
        if after is None:
            return JsonResponse(found.body())
        handle = AsyncJobHandle(self._gateway.producer, found.status.id)
        ask = request_of(found.job, self._gateway.config.background_s)
        return await stream(self._gateway, ask, handle, found.asked, int(found.status.created_at), after)

    async def cancel(self, request: Request) -> Response:
        """Cancel a background response; one that has ended is not changed."""
        caller = await self._gateway.admit(request)
        found = await self._find(str(request.path_params["response_id"]), caller)
        if not found.is_background:
            raise ApiError(400, "only background responses can be cancelled", "not_in_background")
        handle = AsyncJobHandle(self._gateway.producer, found.status.id)
        async with bounded_answer():
            will_end = await handle.cancel()
        if not will_end:
            return JsonResponse((await self._find(responses.response_id(handle.id), caller)).body())
        with contextlib.suppress(JobError, ResultTimeout):
            await handle.result(_CANCEL_S)
        return JsonResponse(found.body("cancelled"))

    async def delete(self, request: Request) -> Response:
        """Delete a response with its job, in any state."""
        caller = await self._gateway.admit(request)
        found = await self._find(str(request.path_params["response_id"]), caller)
        call = purge.jobs(self._queue, found.status.tenant, [found.status.id], by_force=True)
        await self._gateway.run(call)
        name = responses.response_id(found.status.id)
        return JsonResponse({"id": name, "object": "response", "deleted": True})

    async def conversation(self, response_id: Any, caller: ApiKey) -> list[dict[str, Any]]:
        """Return the messages of the response that a request continues. Raises ApiError."""
        found = await self._find(response_id if isinstance(response_id, str) else "", caller)
        if found.outcome.result is None:
            message = "the previous response has no output: retrieve it, and continue it once it is completed"
            raise ApiError(400, message, "previous_response_unfinished", "previous_response_id")
        return stored_responses.conversation(found.job, found.asked, found.outcome.result.outputs[0])

    async def _find(self, response_id: str, caller: ApiKey) -> Stored:
        """Return a response of the caller's tenant. Others' responses look nonexistent."""
        missing = not_found("response", response_id)
        job_id = responses.job_id_of(response_id)
        if not keys.ID_PATTERN.fullmatch(job_id):
            raise missing
        (status,) = await self._gateway.run(reads.statuses(self._queue, [job_id]))
        if status is None or status.tenant != caller.tenant:
            raise missing
        try:
            job, outcome = await read_recorded(self._gateway, job_id)
        except Unverifiable:
            raise missing from None
        asked = stored_responses.request_of(job, status.metadata)
        if asked is None or not caller.allows(job.adapter or job.model):
            raise missing
        if outcome.state is not None and outcome.state != status.state:
            status = status.model_copy(update={"state": outcome.state})
        return Stored(job, status, asked, outcome)


async def read_recorded(gateway: Gateway, job_id: str) -> tuple[Job, Outcome]:
    """Return a job as it was submitted, and its outcome. Raises Unverifiable if either is missing or damaged."""

    def read() -> Flow[tuple[Job, Outcome]]:
        found: Recorded = yield reads.recorded(gateway.config.queue, job_id)
        job = yield from submitted_job(found, gateway.producer.preparer, job_id)
        if found.outcome is None:
            raise Unverifiable(f"the stored result of job {job_id} can't be read")
        return job, (yield from flows.loaded(found.outcome))

    async with bounded_answer():
        return await gateway.producer.run_flow(read())


async def begin(gateway: Gateway, ask: ParsedRequest, handle: AsyncJobHandle, created: int) -> Response:
    """Respond to the request that has submitted a background response."""
    assert ask.response is not None
    if ask.stream:
        return await stream(gateway, ask, handle, ask.response, created, after=-1)
    return JsonResponse(responses.response(ask.response, handle.id, created, status="queued"))


async def stream(
    gateway: Gateway,
    ask: ParsedRequest,
    handle: AsyncJobHandle,
    asked: Mapping[str, Any],
    created: int,
    after: int,
) -> Response:
    """Stream a background response's events that are numbered higher than `after`."""
    events = BackgroundStream(ask, handle, asked, created, after)
    chunks = events.chunks()

    def closed() -> None:
        gateway.metrics.streams -= 1
        gateway.metrics.stream_errors += events.has_failed

    first = await anext(chunks)
    gateway.metrics.streams += 1
    return EventStream(first, chunks, gateway.config.ping_s, closed)


class BackgroundStream(ResponseStream):
    """Events that can be read again from any position, on any gateway.

    Their numbers only depend on the text: a delta counts once per character and has its last character's number, any
    other event counts once. So the deltas of the first transmission do not matter. Calls are sent at the end, because
    text may follow them, and a later reader receives the text as a whole.
    """

    def __init__(
        self, ask: ParsedRequest, handle: AsyncJobHandle, asked: Mapping[str, Any], created: int, after: int
    ) -> None:
        super().__init__(ask, handle, asked)
        self._created = created
        self._after = after
        self._position = 0
        self._has_begun = False
        self._error: JobError | None = None
        self._calls: dict[str | int, TextDelta] = {}

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        """Yield the events to send; the first immediately, so that the client has the response's id."""
        body = self._response("queued")
        head = [self._event(f"response.{word}", response=body) for word in ("created", "queued")]
        yield b"".join(head) or b": continued\n\n"
        try:
            async for chunk in super().chunks():
                if chunk:
                    yield chunk
        except (PagemillError, ApiError) as error:
            api_error = error if isinstance(error, ApiError) else as_api_error(error)
            self.has_failed = api_error.status >= 500
            yield self._failing(api_error)

    def _begin(self, number: int, index: int) -> list[bytes]:
        if self._has_begun:
            return []
        self._has_begun = True
        return [self._event("response.in_progress", response=self._response("in_progress"))]

    def _pieces(
        self, number: int, index: int, news: list[TextDelta], positions: tuple[PositionLogprobs, ...] | None
    ) -> list[bytes]:
        for one in news:
            if isinstance(one.part, int):
                begun = self._calls.get(one.part, replace(one, text=""))
                self._calls[one.part] = replace(begun, text=begun.text + one.text)
        texts = [one for one in news if isinstance(one.part, str)]
        if self._items and any(one.part == "reasoning" for one in texts):
            # A later reader receives all of the reasoning before the text, so its events would have other numbers.
            raise diverged()
        return super()._pieces(number, index, texts, positions)

    def _finish(self, number: int, output: Output) -> list[bytes]:
        calls = super()._pieces(number, output.index, list(self._calls.values()), None)
        return [*calls, *super()._finish(number, output)]

    async def _last_chunks(self, number: int) -> list[bytes]:
        try:
            return await super()._last_chunks(number)
        except JobError as error:
            self._error = error
            return []

    def _closing(self) -> list[bytes]:
        error = self._error
        if error is None:
            return super()._closing()
        if error.state == "cancelled":
            body = self._response("cancelled")
        else:
            body = self._response("failed", error_body(error.code or error.state, error.message))
        return [self._event("response.failed", response=body)]

    def _response(self, status: str, error: Mapping[str, str] | None = None) -> dict[str, Any]:
        return responses.response(self._asked, self._job_id, self._created, status=status, error=error)

    def _event(self, kind: str, **fields: Any) -> bytes:
        first = self._position
        self._position += len(fields["delta"]) if "delta" in fields else 1
        last = self._position - 1
        if last <= self._after:
            return b""
        if first <= self._after:
            fields["delta"] = fields["delta"][self._after + 1 - first :]
        self._num_events = last
        return super()._event(kind, **fields)


def _starting_after(request: Request) -> int | None:
    """Return the number after which a stream starts, -1 for all events; None: not a stream. Raises ApiError."""
    given = request.query_params
    if given.get("stream", "false") not in ("true", "false"):
        raise ApiError(400, "stream should be true or false", "invalid_value", "stream")
    number = given.get("starting_after")
    if given.get("stream") != "true":
        if number is not None:
            raise ApiError(400, "starting_after needs stream=true", "invalid_value", "starting_after")
        return None
    if number is None:
        return -1
    if not (number.isascii() and number.isdigit() and len(number) < 12):
        raise ApiError(400, "starting_after should be a sequence_number", "invalid_value", "starting_after")
    return int(number)
