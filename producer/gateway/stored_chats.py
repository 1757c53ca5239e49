"""/v1/chat/completions/{id}: chats with `store: true`. The job's own record is stored, with its lifetime."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.client import flows
from pagemill.producer.gateway.api_keys import ApiKey
from pagemill.producer.gateway.bounded_answer import bounded_answer
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.pagination import after, page_body, read_paging
from pagemill.producer.gateway.request_parsing import STORED_CHAT, read_object
from pagemill.producer.gateway.stored_responses import read_recorded
from pagemill.producer.openai.formats import CHAT_URL, check_metadata, choices, completion, completion_id
from pagemill.producer.wire.calls import purge, reads
from pagemill.producer.wire.calls.gateway import stored_chats
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import Unverifiable
from pagemill.producer.wire.schema.outputs import JobStatus
from pagemill.producer.wire.schema.text.chat import Message

_MAX_PAGE_BYTES = 8 << 20
"""Maximum bytes of a page of completions before its last one; a page may have fewer rows than requested."""
_FILTER = "metadata["


class StoredChats:
    """Endpoints of stored chat completions. A key sees those of its tenant with models that it may use."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._queue = gateway.config.queue

    async def list(self, request: Request) -> Response:
        """Return a page of the finished chat completions, the oldest first."""
        caller, query = await self._gateway.admit(request), request.query_params
        filters = {name for name in query if name.startswith(_FILTER) and name.endswith("]")}
        paging = read_paging(request, {"model", *filters})
        metadata = {name[len(_FILTER) : -1]: query[name] for name in filters}
        rows: list[dict[str, Any]] = []
        size, is_desc = 0, query.get("order") == "desc"
        async for job_id, about in self._listed(caller, paging.after, is_desc=is_desc):
            has_all = metadata.items() <= (about.get("metadata") or {}).items()
            if not has_all or query.get("model") not in (None, about["model"]):
                continue
            if size > _MAX_PAGE_BYTES or len(rows) == paging.limit:
                return JsonResponse(page_body(rows, paging) | {"has_more": True})
            (status,) = await self._gateway.run(reads.statuses(self._queue, [job_id]))
            body = status and await self._body(status, about)
            if body:
                rows.append(body)
                size += len(json.dumps(body))
        return JsonResponse(page_body(rows, paging))

    async def retrieve(self, request: Request) -> Response:
        """Return a finished chat completion."""
        name, caller = str(request.path_params["completion_id"]), await self._gateway.admit(request)
        body = await self._body(*await self._find(name, caller))
        if body is None:
            raise not_found("completion", name)
        return JsonResponse(body)

    async def update(self, request: Request) -> Response:
        """Replace a chat completion's metadata, and return it."""
        name, caller = str(request.path_params["completion_id"]), await self._gateway.admit(request)
        body = await read_object(request)
        if set(body) != {"metadata"}:
            raise ApiError(400, "the body has metadata, and nothing else", "unsupported_feature", "metadata")
        if (metadata := body["metadata"]) is not None:
            check_metadata(metadata)
        status, about = await self._find(name, caller)
        about["metadata"] = metadata
        try:
            call = stored_chats.set_metadata(self._queue, status.tenant, status.id, {STORED_CHAT: about})
        except ValueError as error:
            raise ApiError(400, str(error), "invalid_value", "metadata") from None
        found = await self._body(status, about)
        if found is None or not await self._gateway.run(call):
            raise not_found("completion", name)
        return JsonResponse(found)

    async def messages(self, request: Request) -> Response:
        """Return a page of the messages that led to a chat completion."""
        name, caller = str(request.path_params["completion_id"]), await self._gateway.admit(request)
        paging = read_paging(request, {"order"})
        status, _ = await self._find(name, caller)
        try:
            job, _ = await read_recorded(self._gateway, status.id)
        except Unverifiable:
            raise not_found("completion", name) from None
        rows = [
            {"content": None, "refusal": None, "content_parts": None}
            | message.model_dump(mode="json", exclude_none=True)
            | _parts(message)
            | {"id": f"{name}-{number}"}
            for number, message in enumerate(job.messages or ())
        ]
        if request.query_params.get("order") == "desc":
            rows.reverse()
        return JsonResponse(page_body(after(rows, paging), paging))

    async def delete(self, request: Request) -> Response:
        """Delete a chat completion with its job."""
        name, caller = str(request.path_params["completion_id"]), await self._gateway.admit(request)
        status, _ = await self._find(name, caller)
        await self._gateway.run(purge.jobs(self._queue, status.tenant, [status.id], by_force=True))
        return JsonResponse({"id": name, "object": "chat.completion.deleted", "deleted": True})

    async def _listed(
        self, caller: ApiKey, after_name: str, *, is_desc: bool
    ) -> AsyncIterator[tuple[str, dict[str, Any]]]:
        """Yield the jobs of the caller's chats after one, with the data stored with them."""
        last = _job_id(after_name) if after_name else ""
        while last is not None:
            call = stored_chats.page(self._queue, caller.tenant, last, is_desc=is_desc)
            found = await self._gateway.run(call)
            for job_id, metadata in found.rows:
                about = _about(metadata, caller)
                if about is not None:
                    yield job_id, about
            last = found.last or None

    async def _find(self, name: str, caller: ApiKey) -> tuple[JobStatus, dict[str, Any]]:
        """Return a completion's job and the data stored with it. Others' completions look nonexistent."""
        missing, job_id = not_found("completion", name), _job_id(name)
        if job_id is None:
            raise missing
        (status,) = await self._gateway.run(reads.statuses(self._queue, [job_id]))
        if status is None or status.tenant != caller.tenant:
            raise missing
        about = _about(status.metadata, caller)
        if about is None:
            raise missing
        return status, about

    async def _body(self, status: JobStatus, about: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return the completion; None if it has no result."""
        async with bounded_answer():
            outcome = await self._gateway.producer.run_flow(flows.outcome(self._queue, status.id))
        result = outcome.result
        if result is None:
            return None
        body = completion(
            CHAT_URL,
            status.id,
            created=int(status.finished_at or status.created_at),
            model=about["model"],
            choices=choices(CHAT_URL, result),
            usage=result.usage,
        )
        return body | {"system_fingerprint": result.fingerprint or None, "metadata": about.get("metadata")}


def _parts(message: Message) -> dict[str, Any]:
    """Return the fields of a message with images, whose `content` is a text."""
    if not message.images:
        return {}
    parts = message.model_dump(mode="json", exclude_none=True)["content"]
    return {"content": message.text, "content_parts": parts}


def _about(metadata: Mapping[str, Any] | None, caller: ApiKey) -> dict[str, Any] | None:
    """Return the data stored with a chat; None for other jobs and models that the caller may not use."""
    about = (metadata or {}).get(STORED_CHAT)
    if not isinstance(about, Mapping) or not isinstance(model := about.get("model"), str):
        return None
    return dict(about) if caller.allows(model) else None


def _job_id(name: str) -> str | None:
    job_id = name.removeprefix(completion_id(CHAT_URL, ""))
    return job_id if job_id != name and keys.ID_PATTERN.fullmatch(job_id) else None
