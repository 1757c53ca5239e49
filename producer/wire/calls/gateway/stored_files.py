"""Files stored in Redis in chunks, as calls: a tenant's uploads and the outputs of batches.

`begin`, `write` every chunk, `finish`: only then can the file be read, unless it grows. Tenants have quotas
of files and bytes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import QueueFull
from pagemill.producer.wire.schema.sealing import ring
from pagemill.producer.wire.server.scripts import Call, as_map

CHUNK_BYTES = 256 << 10
UPLOAD_MS = 900_000
"""An upload that is not finished by then is discarded."""

OUTPUT_PURPOSE = "batch_output"
"""The purpose of files with the results of a batch."""
DeleteReply = Literal["deleted", "missing", "in_use"]


@dataclass(frozen=True, slots=True)
class StoredFile:
    """A complete file. Times are unix seconds."""

    id: str
    expires_at: float
    size: int
    chunks: int
    filename: str
    purpose: str
    created_at: int


def num_chunks(size: int) -> int:
    return -(-size // CHUNK_BYTES)


def begin(
    queue: str,
    tenant: str,
    file: StoredFile,
    *,
    max_files: int,
    max_bytes: int,
    upload_ms: int = UPLOAD_MS,
    is_readable: bool = False,
) -> Call[bool]:
    """Reserve space for the file; `expires_at` is ignored. False: the tenant's quota is used up.

    To enlarge a file, begin it again with more bytes, and with `is_readable` once they are written.

    The server's memory is only checked for uploads, not for the results of batches. Raises QueueFull.
    """

    def parse(reply: int) -> bool:
        if reply < 0:
            raise QueueFull("the Redis server is near its maxmemory", queue=queue, reason="memory")
        return bool(reply)

    may_be_refused = int(file.purpose != OUTPUT_PURPOSE)
    text = json.dumps({"filename": file.filename, "purpose": file.purpose, "created_at": file.created_at})
    args = (tenant, file.id, file.size, file.chunks, text, upload_ms, max_files, max_bytes)
    return Call("file_begin", (keys.prefix(queue),), (*args, may_be_refused, int(is_readable)), parse)


def write(
    queue: str, tenant: str, file_id: str, number: int, chunk: bytes, upload_ms: int = UPLOAD_MS
) -> Call[None]:
    """Store one chunk of a file; all but the last have CHUNK_BYTES."""
    sealed = ring().seal(chunk, "chunk", f"{file_id}:{number}")
    return Call("file_chunk", (keys.prefix(queue),), (file_id, number, upload_ms, sealed, tenant), _nothing)


def finish(queue: str, tenant: str, file_id: str, ttl_s: float) -> Call[StoredFile | None]:
    """Make the file readable for `ttl_s` seconds. None: chunks are missing, begin again."""
    args = (tenant, file_id, int(1000 * ttl_s))
    return Call("file_finish", (keys.prefix(queue),), args, lambda reply: _file(reply) if reply else None)


def find(queue: str, tenant: str, file_id: str) -> Call[StoredFile | None]:
    """Return the tenant's file with that id."""
    return Call(
        "file_list",
        (keys.prefix(queue),),
        (tenant, file_id),
        lambda reply: _file(reply[0]) if reply else None,
    )


def find_all(queue: str, tenant: str) -> Call[list[StoredFile]]:
    """Return all of the tenant's files, newest first."""

    def parse(reply: list[list[Any]]) -> list[StoredFile]:
        return sorted(map(_file, reply), key=lambda file: (file.created_at, file.id), reverse=True)

    return Call("file_list", (keys.prefix(queue),), (tenant, ""), parse)


def read(queue: str, file_id: str, number: int) -> Call[bytes | None]:
    """Return one chunk; None after the file was deleted."""

    def opened(reply: bytes | None) -> bytes | None:
        return None if reply is None else ring().open(reply, "chunk", f"{file_id}:{number}")

    return Call("file_read", (keys.prefix(queue),), (file_id, number), opened)


def delete(queue: str, tenant: str, file_id: str) -> Call[DeleteReply]:
    """Delete a file. in_use: an open batch needs it."""
    return Call("file_delete", (keys.prefix(queue),), (tenant, file_id), lambda reply: reply.decode())


def _file(row: list[Any]) -> StoredFile:
    found = as_map(row)
    about = json.loads(found["record"])
    return StoredFile(
        id=found["id"].decode(),
        expires_at=int(found["expires"]) / 1000,
        size=int(found["bytes"]),
        chunks=int(found["chunks"]),
        filename=about["filename"],
        purpose=about["purpose"],
        created_at=about["created_at"],
    )


def _nothing(reply: Any) -> None:
    return None
