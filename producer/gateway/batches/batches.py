"""/v1/batches: creates, lists, retrieves and cancels batches; runner.py runs them."""

from __future__ import annotations

import io
import json
import re
import secrets
from collections.abc import Iterable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SkipValidation, ValidationError
from starlette.datastructures import UploadFile
from starlette.requests import Request
from starlette.responses import Response

from pagemill.producer.gateway.batches.files import FILE_ID, LONGEST_TTL_S, Expiry, FileEndpoints, read_ttl
from pagemill.producer.gateway.batches.runner import BatchRunner
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.pagination import page_body, read_paging, unknown_cursor
from pagemill.producer.gateway.request_parsing import check_json, read_object
from pagemill.producer.openai.lines import LINE_URLS, LineUrl
from pagemill.producer.wire.calls.gateway import api_batches, stored_files
from pagemill.producer.wire.calls.gateway.api_batches import ApiBatch, BatchStatus
from pagemill.producer.wire.schema.sealing import opened_metadata, ring

BATCH_ID = re.compile(r"batch_[0-9a-f]{24}")
LONGEST_WINDOW_H = 168
MAX_METADATA = 16


def _check_window(window: str) -> str:
    if int(window[:-1]) > LONGEST_WINDOW_H:
        raise ValueError
    return window


class BatchRequest(BaseModel):
    """The request that opens a batch."""

    model_config = ConfigDict(extra="forbid", strict=True)
    input_file_id: Annotated[str, Field(pattern=f"^{FILE_ID.pattern}$")] | None = None
    requests: Annotated[list[dict[str, Any]], Field(min_length=1)] | None = None
    """The lines of the input file, instead of one; `method` and `url` may be omitted."""
    endpoint: LineUrl
    completion_window: Annotated[str, Field(pattern="^[1-9][0-9]{0,2}h$"), AfterValidator(_check_window)]
    metadata: (
        Annotated[
            dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]],
            Field(max_length=MAX_METADATA),
        ]
        | None
    ) = None
    output_expires_after: SkipValidation[Expiry | None] = None


_REFUSALS = {
    "input_file_id": ("file_not_found", "input_file_id is the id of an uploaded file"),
    "requests": ("invalid_requests", "requests is a list of objects, in the place of input_file_id"),
    "endpoint": ("unsupported_feature", f"endpoint is one of {', '.join(LINE_URLS)}"),
    "completion_window": (
        "invalid_window",
        f"completion_window is 24h, or another number of hours up to {LONGEST_WINDOW_H}h",
    ),
    "metadata": (
        "invalid_metadata",
        f"metadata has at most {MAX_METADATA} texts of 512 characters, their names 64",
    ),
}
"""The code and message for an invalid field."""


class Batch(BaseModel):
    """The batch object that clients receive."""

    id: str
    object: Literal["batch"]
    endpoint: str
    errors: dict[str, Any] | None
    input_file_id: str
    completion_window: str
    status: BatchStatus
    output_file_id: str | None = None
    error_file_id: str | None = None
    created_at: int
    expires_at: int
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: dict[str, int]
    usage: dict[str, Any] | None
    metadata: dict[str, str] | None


def batch_body(batch: ApiBatch) -> dict[str, Any]:
    values = {name: value for name, value in batch.values.items() if value}
    parsed = {name: json.loads(values.get(name, "null")) for name in ("errors", "usage")}
    counts = {name: values.get(name, 0) for name in ("total", "completed", "failed")}
    fields = json.loads(values["doc"]) | values | parsed
    if isinstance(stored := fields["metadata"], str):  # not text if the gateway did not encrypt it
        fields["metadata"] = opened_metadata(stored.encode(), batch.id)
    return Batch(**fields | {"id": batch.id, "object": "batch", "request_counts": counts}).model_dump()


class BatchEndpoints:
    """The four endpoints for batches."""

    def __init__(self, gateway: Gateway, runner: BatchRunner, files: FileEndpoints) -> None:
        self._gateway = gateway
        self._files = files
        self._runner = runner

    async def create(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        about, window_s = _read_batch(await read_object(request), self._gateway.config.file_ttl_s)
        now = int(await self._gateway.now())
        about |= {"created_at": now, "expires_at": now + int(window_s)}
        about["priority"] = "low" if caller.priority == "normal" else caller.priority
        about["models"] = caller.models
        about["api_key"] = caller.counted_as
        inline = about.pop("requests")
        if inline is not None:
            about["input_file_id"] = await self._store(caller.tenant, inline, about["endpoint"])
        batch_id = f"batch_{secrets.token_hex(12)}"
        queue, most = self._gateway.config.queue, self._gateway.config.max_tenant_batches
        # Like the metadata of a job. Text in both cases, so that there is one form to read.
        metadata = json.dumps(about["metadata"]).encode()
        about["metadata"] = ring().seal(metadata, "metadata", batch_id).decode()
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
        if reply != "created" and inline is not None:
            await self._gateway.run(stored_files.delete(queue, caller.tenant, about["input_file_id"]))
        if reply == "no_file":
            message = f"no file {about['input_file_id']}"
            raise ApiError(400, message, "file_not_found", "input_file_id")
        if reply == "full":
            raise ApiError(429, f"at most {most} batches may be open", "too_many_batches")
        self._runner.poll_now()
        return JsonResponse(batch_body(await self._find(caller.tenant, batch_id)))

    async def list(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        paging = read_paging(request)
        queue, after = self._gateway.config.queue, paging.after
        if after:
            is_id = BATCH_ID.fullmatch(after) is not None
            if not is_id or not await self._gateway.run(api_batches.find(queue, caller.tenant, after)):
                raise unknown_cursor(paging)
        found = await self._gateway.run(api_batches.find_all(queue, caller.tenant, after, paging.limit + 1))
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
        self._runner.poll_now()
        return JsonResponse(batch_body(batch))

    async def _store(self, tenant: str, requests: Iterable[dict[str, Any]], endpoint: str) -> str:
        """Store requests as an input file, and return its id. Raises ApiError."""
        lines = (json.dumps({"method": "POST", "url": endpoint} | request) for request in requests)
        data = "".join(f"{line}\n" for line in lines).encode()
        upload = UploadFile(io.BytesIO(data), size=len(data), filename="requests.jsonl")
        return (await self._files.store(tenant, upload, self._gateway.config.file_ttl_s)).id

    async def _find(self, tenant: str, batch_id: str) -> ApiBatch:
        batch = await self._gateway.run(api_batches.find(self._gateway.config.queue, tenant, batch_id))
        if batch is None:
            raise not_found("batch", batch_id)
        return batch


def _read_batch(body: dict[str, Any], file_ttl_s: float) -> tuple[dict[str, Any], float]:
    """Return the stored part of a batch request without its times, and its window in seconds. Raises ApiError."""
    try:
        asked = BatchRequest.model_validate(body)
    except ValidationError as error:
        raise _refusal(body, error) from None
    if (asked.input_file_id is None) == (asked.requests is None):
        name = "input_file_id" if asked.requests is None else "requests"
        code, message = _REFUSALS[name]
        raise ApiError(400, message, code, name)
    window_s = 3600.0 * int(asked.completion_window[:-1])
    about = {
        **asked.model_dump(exclude={"output_expires_after"}),
        "output_ttl_s": min(
            LONGEST_TTL_S, read_ttl(asked.output_expires_after, "output_expires_after", file_ttl_s)
        ),
    }
    return about, window_s


def _refusal(body: dict[str, Any], error: ValidationError) -> ApiError:
    """Return the error for an invalid batch request: its first unknown field, or its first invalid one."""
    for name in body:
        if name not in BatchRequest.model_fields:
            return ApiError(400, f"parameter {name[:64]} is not supported", "unsupported_feature", name[:64])
    field = str(error.errors(include_input=False)[0]["loc"][0])
    code, message = _REFUSALS[field]
    return ApiError(400, message, code, field)


def _id_of(request: Request) -> str:
    """Return the id in the path. Raises ApiError if it is malformed."""
    name = str(request.path_params["batch_id"])
    if not BATCH_ID.fullmatch(name):
        raise not_found("batch", name)
    return name
