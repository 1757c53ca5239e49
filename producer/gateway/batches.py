"""/v1/batches: opened, looked at and cancelled here; batch_runner.py runs them."""

from __future__ import annotations

import json
import re
import secrets
import time
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.batch_runner import BatchRunner
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found
from pagemill.producer.gateway.files import FILE_ID, LONGEST_TTL_S, read_ttl
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.pagination import page_body, read_paging
from pagemill.producer.gateway.request_parsing import check_json, read_object
from pagemill.producer.openai.formats import URLS
from pagemill.producer.wire.calls import api_batches
from pagemill.producer.wire.calls.api_batches import ApiBatch

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
_WINDOW = re.compile(r"([1-9][0-9]{0,2})h")
LONGEST_WINDOW_H = 168
_FIELDS = frozenset({"input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after"})
_TIMES = ("in_progress", "finalizing", "completed", "failed", "expired", "cancelling", "cancelled")
MAX_METADATA = 16


def batch_body(batch: ApiBatch) -> dict[str, Any]:
    values = batch.values
    about = json.loads(values["doc"])
    counts = {name: int(values.get(name, 0)) for name in ("total", "completed", "failed")}
    times = {f"{name}_at": _whole(values.get(f"{name}_at")) for name in _TIMES}
    return {
        "id": batch.id,
        "object": "batch",
        "endpoint": about["endpoint"],
        "errors": json.loads(values["errors"]) if "errors" in values else None,
        "input_file_id": about["input_file_id"],
        "completion_window": about["completion_window"],
        "status": batch.status,
        "output_file_id": values.get("output_file_id") or None,
        "error_file_id": values.get("error_file_id") or None,
        "created_at": about["created_at"],
        "expires_at": about["expires_at"],
        **times,
        "request_counts": counts,
        "usage": json.loads(values["usage"]) if "usage" in values else None,
        "metadata": about["metadata"],
    }


def _whole(text: str | None) -> int | None:
    return int(text) if text else None


class BatchEndpoints:
    """The four things to do with batches."""

    def __init__(self, gateway: Gateway, runner: BatchRunner) -> None:
        self._gateway = gateway
        self._runner = runner

    async def create(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        about, window_s = _read_batch(await read_object(request), self._gateway.config.file_ttl_s)
        about["priority"] = "low" if caller.priority == "normal" else caller.priority
        about["models"] = caller.models
        batch_id = f"batch_{secrets.token_hex(12)}"
        queue, most = self._gateway.config.queue, self._gateway.config.max_tenant_batches
        create = api_batches.create(
            queue,
            batch_id,
            caller.tenant,
            about["input_file_id"],
            json.dumps(about),
            window_s=window_s,
            max_open=most,
        )
        reply = await self._gateway.run(create)
        if reply == "no_file":
            message = f"no file {about['input_file_id']}"
            raise ApiError(400, message, "file_not_found", "input_file_id")
        if reply == "full":
            raise ApiError(429, f"at most {most} batches may be open", "too_many_batches")
        self._runner.look_now()
        return JsonResponse(batch_body(await self._find(caller.tenant, batch_id)))

    async def list(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        paging = read_paging(request)
        after = paging.after if BATCH_ID.fullmatch(paging.after) else ""
        find = api_batches.find_all(self._gateway.config.queue, caller.tenant, after, paging.limit + 1)
        found = [] if paging.after and not after else await self._gateway.run(find)
        return JsonResponse(page_body([batch_body(batch) for batch in found], paging))

    async def retrieve(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        return JsonResponse(batch_body(await self._find(caller.tenant, _id_of(request))))

    async def cancel(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        check_json(request, may_be_unsaid=True)
        batch_id = _id_of(request)
        call = api_batches.cancel(self._gateway.config.queue, caller.tenant, batch_id)
        batch = await self._gateway.run(call)
        if batch is None:
            raise not_found("batch", batch_id)
        if batch.status not in ("cancelling", "cancelled", "finalizing"):
            raise ApiError(409, f"the batch has ended: it is {batch.status}", "batch_ended")
        self._runner.look_now()
        return JsonResponse(batch_body(batch))

    async def _find(self, tenant: str, batch_id: str) -> ApiBatch:
        batch = await self._gateway.run(api_batches.find(self._gateway.config.queue, tenant, batch_id))
        if batch is None:
            raise not_found("batch", batch_id)
        return batch


def _read_batch(body: dict[str, Any], file_ttl_s: float) -> tuple[dict[str, Any], float]:
    """What is kept of a request for a batch, and its window in seconds. Raises ApiError."""
    for name in body:
        if name not in _FIELDS:
            raise ApiError(400, f"parameter {name[:64]} is not supported", "unsupported_feature", name[:64])
    file_id, endpoint = body.get("input_file_id"), body.get("endpoint")
    if not isinstance(file_id, str) or not FILE_ID.fullmatch(file_id):
        raise ApiError(400, "input_file_id is the id of an uploaded file", "file_not_found", "input_file_id")
    if endpoint not in URLS:
        raise ApiError(400, f"endpoint is one of {', '.join(URLS)}", "unsupported_feature", "endpoint")
    window = body.get("completion_window")
    match = _WINDOW.fullmatch(window) if isinstance(window, str) else None
    if match is None or int(match[1]) > LONGEST_WINDOW_H:
        message = f"completion_window is 24h, or another number of hours up to {LONGEST_WINDOW_H}h"
        raise ApiError(400, message, "invalid_window", "completion_window")
    window_s = 3600.0 * int(match[1])
    now = int(time.time())
    about = {
        "input_file_id": file_id,
        "endpoint": endpoint,
        "completion_window": window,
        "metadata": _read_metadata(body.get("metadata")),
        "created_at": now,
        "expires_at": now + int(window_s),
        "output_ttl_s": min(
            LONGEST_TTL_S, read_ttl(body.get("output_expires_after"), "output_expires_after", file_ttl_s)
        ),
    }
    return about, window_s


def _read_metadata(given: Any) -> dict[str, str] | None:
    if given is None:
        return None
    is_sound = isinstance(given, dict) and len(given) <= MAX_METADATA
    if not is_sound or not all(
        len(n) <= 64 and isinstance(v, str) and len(v) <= 512 for n, v in given.items()
    ):
        message = f"metadata has at most {MAX_METADATA} texts of 512 characters, their names 64"
        raise ApiError(400, message, "invalid_metadata", "metadata")
    return dict(given)


def _id_of(request: Request) -> str:
    """The id in the path. Raises ApiError for what can't be one."""
    name = str(request.path_params["batch_id"])
    if not BATCH_ID.fullmatch(name):
        raise not_found("batch", name)
    return name
