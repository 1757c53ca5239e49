"""/v1/files: uploads for batches and the outputs of batches, in Redis.

An id is only looked up among the tenant's own files: it is never a path, and never finds another tenant's file.
"""

from __future__ import annotations

import re
import secrets
from collections import Counter
from collections.abc import AsyncIterator
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from starlette.datastructures import FormData, UploadFile
from starlette.formparsers import MultiPartException, MultiPartParser
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from pagemill.producer.gateway.config import DAY_S
from pagemill.producer.gateway.errors import ApiError, JsonResponse, not_found, retry_later
from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.gateway.pagination import after, page_body, read_paging
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import CHUNK_BYTES, StoredFile

FILE_ID = re.compile(r"file-[0-9a-f]{24}")
LONGEST_TTL_S = 30 * DAY_S
SHORTEST_TTL_S = 3600
_MAX_NAME = 255
_FIELDS = frozenset({"file", "purpose", "expires_after[anchor]", "expires_after[seconds]"})


class File(BaseModel):
    """The file object that clients receive."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: str
    status: Literal["processed"]


class Expiry(BaseModel):
    """The lifetime of a file."""

    model_config = ConfigDict(extra="forbid")
    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=SHORTEST_TTL_S, le=int(LONGEST_TTL_S))]


def file_body(file: StoredFile) -> dict[str, Any]:
    return File(
        id=file.id, object="file", bytes=file.size, created_at=file.created_at, expires_at=int(file.expires_at),
        filename=file.filename, purpose=file.purpose, status="processed",
    ).model_dump()  # fmt: skip


class FileEndpoints:
    """The five endpoints for files."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._uploads: Counter[str] = Counter()
        """Number in progress, by API key."""

    async def create(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        key = caller.name
        if self._uploads.total() >= self._gateway.config.max_uploads:
            self._gateway.metrics.refused["busy"] += 1
            raise retry_later(503, "the gateway has too many uploads in progress", "busy")
        if not self._gateway.keys.is_open and self._uploads[key] >= self._gateway.config.max_key_uploads:
            self._gateway.metrics.refused["busy"] += 1
            raise retry_later(429, "the API key has too many uploads in progress", "too_many_uploads")
        self._uploads[key] += 1
        try:
            async with _Form(request) as form:
                upload, ttl_s = _read_form(form, self._gateway.config.file_ttl_s)
                return JsonResponse(file_body(await self.store(caller.tenant, upload, ttl_s)))
        finally:
            self._uploads[key] -= 1
            self._uploads += Counter()  # drops the keys without uploads

    async def list(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        paging = read_paging(request, {"purpose"}, longest=10_000)
        found = await self._gateway.run(stored_files.find_all(self._gateway.config.queue, caller.tenant))
        purpose = request.query_params.get("purpose")
        rows = [file_body(file) for file in found if purpose in (None, file.purpose)]
        if request.query_params.get("order") == "asc":
            rows.reverse()
        return JsonResponse(page_body(after(rows, paging), paging))

    async def retrieve(self, request: Request) -> Response:
        return JsonResponse(file_body(await self._find(request)))

    async def content(self, request: Request) -> Response:
        file = await self._find(request)
        # The header uses a generated file name, since the original one is untrusted input.
        headers = {
            "content-length": str(file.size),
            "content-disposition": f'attachment; filename="{file.id}.jsonl"',
        }
        return StreamingResponse(self._chunks(file), media_type="application/octet-stream", headers=headers)

    async def delete(self, request: Request) -> Response:
        caller = await self._gateway.admit(request)
        file_id = _id_of(request)
        reply = await self._gateway.run(
            stored_files.delete(self._gateway.config.queue, caller.tenant, file_id)
        )
        if reply == "missing":
            raise not_found("file", file_id)
        if reply == "in_use":
            raise ApiError(409, "an unfinished batch needs the file", "file_in_use")
        return JsonResponse({"id": file_id, "object": "file", "deleted": True})

    async def store(self, tenant: str, upload: UploadFile, ttl_s: float) -> StoredFile:
        """Store an input file of batches. Raises ApiError."""
        config, run = self._gateway.config, self._gateway.run
        size = upload.size or 0
        if not size:
            raise ApiError(400, "the file is empty", "empty_file", "file")
        if size > config.max_file_bytes:
            raise ApiError(413, f"a file has at most {config.max_file_bytes} bytes", "file_too_large", "file")
        file = StoredFile(
            id=f"file-{secrets.token_hex(12)}",
            expires_at=0.0,
            size=size,
            chunks=stored_files.num_chunks(size),
            filename=_shown_name(upload.filename),
            purpose="batch",
            created_at=int(await self._gateway.now()),
        )
        begin = stored_files.begin(
            config.queue, tenant, file, max_files=config.max_tenant_files, max_bytes=config.max_tenant_bytes
        )
        if not await run(begin):
            raise ApiError(429, "no room for more files: delete some", "file_quota_exceeded")
        for number in range(file.chunks):
            await run(
                stored_files.write(config.queue, tenant, file.id, number, await upload.read(CHUNK_BYTES))
            )
        stored = await run(stored_files.finish(config.queue, tenant, file.id, ttl_s))
        if stored is None:
            raise ApiError(503, "the upload could not be kept, try again", "upload_lost")
        return stored

    async def _find(self, request: Request) -> StoredFile:
        caller = await self._gateway.admit(request)
        file_id = _id_of(request)
        found = await self._gateway.run(stored_files.find(self._gateway.config.queue, caller.tenant, file_id))
        if found is None:
            raise not_found("file", file_id)
        return found

    async def _chunks(self, file: StoredFile) -> AsyncIterator[bytes]:
        left = file.size  # the last chunk of a growing file may have more by now
        for number in range(file.chunks):
            chunk = await self._gateway.run(stored_files.read(self._gateway.config.queue, file.id, number))
            if chunk is None:
                raise ApiError(500, "the file was deleted while it was read", "file_gone")
            yield chunk[:left]
            left -= len(chunk)


class _Form:
    """A multipart form; its upload is a temporary file that is removed at the end of the block."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._form: FormData | None = None

    async def __aenter__(self) -> FormData:
        kind = self._request.headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "multipart/form-data":
            message = "the content type must be multipart/form-data"
            raise ApiError(415, message, "unsupported_media_type")
        parser = MultiPartParser(
            self._request.headers, self._request.stream(), max_files=1, max_fields=8, max_part_size=4096
        )
        try:
            self._form = await parser.parse()
        except (MultiPartException, KeyError, ValueError, UnicodeError) as error:
            reason = error.message if isinstance(error, MultiPartException) else "it cannot be parsed"
            raise ApiError(400, f"the form is not valid: {reason}", "invalid_form") from None
        return self._form

    async def __aexit__(self, *_: object) -> None:
        if self._form is not None:
            await self._form.close()


def _read_form(form: FormData, default_ttl_s: float) -> tuple[UploadFile, float]:
    """Return the file and the time to keep it, in seconds. Raises ApiError."""
    for name in form:
        if name not in _FIELDS:
            shown = name[:64]
            raise ApiError(400, f"the field {shown!a} is not supported", "unsupported_feature", shown)
    upload, purpose = form.get("file"), form.get("purpose")
    if not isinstance(upload, UploadFile):
        raise ApiError(400, "file is missing", "missing_file", "file")
    if purpose != "batch":
        raise ApiError(400, "purpose must be batch", "unsupported_purpose", "purpose")
    return upload, read_ttl(
        {
            name: form.get(f"expires_after[{name}]")
            for name in ("anchor", "seconds")
            if f"expires_after[{name}]" in form
        },
        "expires_after",
        default_ttl_s,
    )


def read_ttl(given: Any, place: str, default_s: float) -> float:
    """Read OpenAI's `{"anchor": "created_at", "seconds": n}` as seconds to keep a file. Raises ApiError."""
    if given is None or given == {}:
        return default_s
    try:
        return float(Expiry.model_validate(given).seconds)
    except ValidationError as error:
        first = error.errors(include_input=False)[0]
        if first["loc"] == ("seconds",) and first["type"] != "missing":
            message = f"{place}.seconds is a whole number from {SHORTEST_TTL_S} to {LONGEST_TTL_S:.0f}"
            raise ApiError(400, message, "invalid_expiry", f"{place}.seconds") from None
        raise ApiError(400, f"{place} has anchor (created_at) and seconds", "invalid_expiry", place) from None


def _id_of(request: Request) -> str:
    """Return the id in the path. Raises ApiError if it is malformed."""
    name = str(request.path_params["file_id"])
    if not FILE_ID.fullmatch(name):
        raise not_found("file", name)
    return name


def _shown_name(name: str | None) -> str:
    """Return the last part of the uploader's file name as printable text; it is never used to open a file."""
    last = re.split(r"[/\\]", name or "")[-1]
    return "".join(letter for letter in last if letter.isprintable())[:_MAX_NAME] or "upload.jsonl"
