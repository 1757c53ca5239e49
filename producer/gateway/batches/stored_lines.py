"""Lines of a growing stored file, spooled to a temporary file because the last chunk is written again."""

from __future__ import annotations

import io
import json
import tempfile
from types import TracebackType
from typing import Any, Self

from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import CHUNK_BYTES, StoredFile
from pagemill.producer.wire.schema.errors import QueueFull

_IN_MEMORY = 1 << 20


class StoredLines:
    """JSON lines for the file `file_id` of a tenant. Writing the same lines again results in the same file."""

    def __init__(self, gateway: Gateway, tenant: str, file_id: str, filename: str) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._file_id = file_id
        self._filename = filename
        self._shown = 0
        """Number of readable bytes."""
        self._written = 0
        """Number of those bytes written by this object; an earlier run may have written the others."""
        self._created_at: int | None = None
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  # closed by __exit__
        self.size = 0
        """Number of bytes written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()

    def write(self, line: dict[str, Any], /) -> None:
        self._spool.seek(0, io.SEEK_END)
        self.size += self._spool.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    async def resume(self) -> None:
        """Keep the output of an earlier run: the file does not shrink while the same lines are written again."""
        file = await self._gateway.run(
            stored_files.find(self._gateway.config.queue, self._tenant, self._file_id)
        )
        self._shown = 0 if file is None else file.size

    async def grow(self, until: float) -> str | None:
        """Make the lines so far readable until the unix time `until`. Returns the file's id, None if there are none."""
        if self.size > self._shown:
            await self._write(round(1000 * (until - await self._gateway.now())))
        return self._file_id if self._shown else None

    async def store(self, ttl_s: float) -> str | None:
        """Store all lines. Returns the file's id, None if there are none. Raises QueueFull if memory is used up."""
        if not self.size:
            return None
        await self._write(stored_files.UPLOAD_MS)
        finish = stored_files.finish(self._gateway.config.queue, self._tenant, self._file_id, ttl_s)
        if await self._gateway.run(finish) is None:
            raise QueueFull(f"{self._file_id} could not be kept")
        return self._file_id

    async def _write(self, kept_ms: int) -> None:
        """Write the chunks that are incomplete in Redis, then their size."""
        queue, run = self._gateway.config.queue, self._gateway.run
        if not self._shown:
            await self._begin(kept_ms, is_readable=False)
        first, last = self._written // CHUNK_BYTES, stored_files.num_chunks(self.size)
        self._spool.seek(first * CHUNK_BYTES)
        for number in range(first, last):
            chunk = self._spool.read(CHUNK_BYTES)
            await run(stored_files.write(queue, self._tenant, self._file_id, number, chunk, kept_ms))
        await self._begin(kept_ms, is_readable=True)
        self._shown = self._written = self.size

    async def _begin(self, kept_ms: int, *, is_readable: bool) -> None:
        if self._created_at is None:
            self._created_at = int(await self._gateway.now())
        file = StoredFile(
            id=self._file_id,
            expires_at=0.0,
            size=self.size,
            chunks=stored_files.num_chunks(self.size),
            filename=self._filename,
            purpose=stored_files.OUTPUT_PURPOSE,
            created_at=self._created_at,
        )
        # Without a quota: the batch limits the size of its output.
        begin = stored_files.begin(
            self._gateway.config.queue,
            self._tenant,
            file,
            max_files=1 << 31,
            max_bytes=1 << 50,
            upload_ms=kept_ms,
            is_readable=is_readable,
        )
        await self._gateway.run(begin)
