"""/jobs/api: the data of the jobs page. A key sees its own tenant's jobs; an operator's key sees all.

Prompts and outputs are not shown. This is not an interface for other programs: it changes with the page.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from pagemill.producer.client import job_search
from pagemill.producer.client.effects import Flow, T
from pagemill.producer.client.preparer import check_id
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.bounded_answer import bounded_answer, noting_answers
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.guard.origin import LOOPBACK
from pagemill.producer.gateway.jobs import overview
from pagemill.producer.gateway.jobs.page import page_routes
from pagemill.producer.wire.calls import account, reads, transitions
from pagemill.producer.wire.calls.account import MEANINGS
from pagemill.producer.wire.calls.history import JobHistory, history
from pagemill.producer.wire.calls.job_lists import JobFilter
from pagemill.producer.wire.calls.timeline import timeline
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import AccessDenied
from pagemill.producer.wire.schema.outputs import ACTIVE_STATES, END_STATES

logger = logging.getLogger(__name__)

PAGE_JOBS = 50
LONGEST_KEY = 1024
_READERS = 2
"""Maximum concurrent lists of one gateway; each is a series of short calls."""
_FILTERS = ("state", "tenant", "model", "key", "batch", "after")


def job_routes(gateway: Gateway) -> list[Route]:
    """Return the routes of the jobs page."""
    jobs = JobEndpoints(gateway)
    return [
        *page_routes(),
        Route("/jobs/api/queue", jobs.queue, methods=["GET"]),
        Route("/jobs/api/list", jobs.list, methods=["GET"]),
        Route("/jobs/api/batches", jobs.batches, methods=["GET"]),
        Route("/jobs/api/batches/{batch_id}/cancel", jobs.cancel_batch, methods=["POST"]),
        Route("/jobs/api/job/{job_id}", jobs.show, methods=["GET"]),
        Route("/jobs/api/job/{job_id}/cancel", jobs.cancel, methods=["POST"]),
        Route("/jobs/api/job/{job_id}/replay", jobs.replay, methods=["POST"]),
    ]


class JobEndpoints:
    """The page's requests. Each counts towards the key's rate."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._queue = gateway.config.queue
        self._turns = asyncio.Semaphore(_READERS)

    async def queue(self, request: Request) -> Response:
        """Return the queue's statistics; for a tenant's key only its own waiting jobs."""
        _, tenant = await self._admit(request)
        return _answer(await self._read(overview.queue(self._queue, tenant)))

    async def list(self, request: Request) -> Response:
        """Return jobs of a state, tenant, model, key or batch."""
        _, tenant = await self._admit(request)
        asked = _read_filters(request)
        wanted = JobFilter(
            state=asked["state"], tenant=tenant or asked["tenant"], model=asked["model"], key=asked["key"]
        )
        flow = job_search.search(
            self._queue, wanted, batch=asked["batch"], after=asked["after"], limit=PAGE_JOBS
        )
        try:
            found = await self._read(flow)
        except AccessDenied:
            message = "the server's access rules do not let the gateway look for ended jobs: it needs +scan"
            raise ApiError(403, message, "scan_denied") from None
        jobs = [job.model_dump() for job in found.jobs]
        return _answer({"jobs": jobs, "after": found.after, "looked": found.looked})

    async def batches(self, request: Request) -> Response:
        """Return batches with their progress, the most recently extended or ended one first."""
        _, tenant = await self._admit(request)
        after = request.query_params.get("after", "0")
        if not (after.isascii() and after.isdigit() and len(after) < 10):
            raise _wrong("after")
        return _answer(await self._read(overview.batches(self._queue, tenant, int(after), PAGE_JOBS)))

    async def show(self, request: Request) -> Response:
        """Return a job's record, its timeline and a breakdown of its time, without the jobs ahead of it."""
        _, tenant = await self._admit(request)
        job = await self._find(request, tenant)
        (status,) = await self._gateway.run(reads.statuses(self._queue, [job.id]))
        events = [
            {"at": at, "event": what, "worker": where, "reason": why}
            for at, what, where, why in timeline(job)
        ]
        times = await self._gateway.run(account.why(self._queue, job.id))
        more = {
            "parts": [part.model_dump() | {"meaning": MEANINGS[part.cause]} for part in times.parts]
            if times
            else [],
            "metadata": status.metadata if status else None,
            "position": status.position if status else None,
            "note": status.error if status and job.state in ACTIVE_STATES else None,
        }
        return _answer({"job": job.model_dump(), "timeline": events} | more)

    async def cancel(self, request: Request) -> Response:
        """Cancel a job: `cancelled`, `requested` (its worker will stop it) or `done` (it had ended)."""
        caller, tenant = await self._admit(request)
        job = await self._find(request, tenant)
        (outcome,) = await self._gateway.run(transitions.cancel(self._queue, [job.id]))
        _log("cancel", caller, job.id, outcome)
        return _answer({"id": job.id, "outcome": outcome})

    async def replay(self, request: Request) -> Response:
        """Submit a dead job again as a new one; once, even if the request is repeated."""
        caller, tenant = await self._admit(request)
        job = await self._find(request, tenant)
        if not caller.allows(job.model):
            raise ApiError(403, "the API key may not use the job's model", "model_not_allowed")
        async with bounded_answer():
            done = await self._gateway.producer.dead_letters().replay([job.id])
        if (reason := done.refused.get(job.id)) is not None:
            raise ApiError(409, f"the job can't be replayed: {reason}", "not_replayed")
        is_new = job.id in done.jobs
        _log("replay", caller, job.id, "created" if is_new else "same")
        return _answer({"id": job.id, "job": (done.jobs | done.already)[job.id], "is_new": is_new})

    async def cancel_batch(self, request: Request) -> Response:
        """Cancel the unfinished jobs of a batch: those of the key's tenant, or all for an operator's key."""
        caller, tenant = await self._admit(request)
        batch_id = check_id(request.path_params["batch_id"])
        stopped = await self._read(overview.cancel_batch(self._queue, tenant, batch_id))
        if stopped is None:
            raise not_found("batch", batch_id)
        _log("cancel batch", caller, batch_id, str(stopped))
        return _answer({"id": batch_id, "stopped": stopped})

    async def _read(self, flow: Flow[T]) -> T:
        """Run a flow when a reader is free. Raises RedisUnavailable if a call is not answered for `ANSWER_S`."""
        async with bounded_answer() as answered, self._turns:
            return await self._gateway.producer.run_flow(noting_answers(flow, answered))

    async def _admit(self, request: Request) -> tuple[ApiKey, str]:
        """Return the request's key, and the tenant whose jobs it sees, '' for all. Raises ApiError."""
        gateway = self._gateway
        caller = await gateway.admit(request)
        if not gateway.keys.is_open:
            return caller, "" if caller.operator else caller.tenant
        if gateway.config.host not in LOOPBACK:
            message = (
                "without API keys the page of jobs is for this machine only; start the gateway with --keys"
            )
            raise ApiError(403, message, "keys_needed")
        return caller, ""

    async def _find(self, request: Request, tenant: str) -> JobHistory:
        """Return the job of the path. The responses for another tenant's job and a missing one are the same."""
        job_id = str(request.path_params["job_id"])
        found = (
            await self._gateway.run(history(self._queue, job_id))
            if keys.ID_PATTERN.fullmatch(job_id)
            else None
        )
        if found is None or tenant not in ("", found.tenant):
            raise not_found("job", job_id)
        return found


def _answer(body: dict[str, Any]) -> Response:
    return JsonResponse(body, headers={"cache-control": "no-store"})


def _read_filters(request: Request) -> dict[str, str]:
    query = request.query_params
    found = {name: query.get(name, "") for name in _FILTERS}
    patterns = {"tenant": keys.TENANT_PATTERN, "model": keys.MODEL_PATTERN, "batch": keys.ID_PATTERN}
    for name, pattern in patterns.items():
        if found[name] and not pattern.fullmatch(found[name]):
            raise _wrong(name)
    if found["state"] not in ("", *ACTIVE_STATES, *END_STATES):
        raise _wrong("state")
    if len(found["key"]) > LONGEST_KEY:
        raise _wrong("key")
    return found


def _wrong(name: str) -> ApiError:
    return ApiError(400, f"{name} is not valid", "invalid_value", name)


def _log(action: str, caller: ApiKey, name: str, outcome: str) -> None:
    """Log which caller did what to which job."""
    fields = {"action": action, "key_name": caller.name, "id": name, "outcome": outcome}
    logger.info("page of jobs", extra=fields)
