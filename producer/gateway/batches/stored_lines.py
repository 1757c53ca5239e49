"""Lines for a stored file, spooled to a temporary file because the size must be known before the bytes."""

from __future__ import annotations

import json
import tempfile
import time
from types import TracebackType
from typing import Any, Self

from pagemill.producer.gateway.gateway import Gateway
from pagemill.producer.wire.calls.gateway import stored_files
from pagemill.producer.wire.calls.gateway.stored_files import CHUNK_BYTES, StoredFile
from pagemill.producer.wire.schema.errors import QueueFull

_IN_MEMORY = 1 << 20


class StoredLines:
    """JSON lines for the file `file_id` of a tenant. Writing the same lines again gives the same file."""

    def __init__(self, gateway: Gateway, tenant: str, file_id: str, filename: str) -> None:
        self._gateway = gateway
        self._tenant = tenant
        self._file_id = file_id
        self._filename = filename
        self._spool = tempfile.SpooledTemporaryFile(_IN_MEMORY)  # noqa: SIM115  # closed by __exit__
        self.size = 0
        """Bytes written so far."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._spool.close()

    def write(self, line: dict[str, Any], /) -> None:
        self.size += self._spool.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    async def store(self, ttl_s: float) -> str | None:
        """Store the lines; returns the file's id, None if there are none. Raises QueueFull if out of room."""
        if not self.size:
            return None
        queue, run = self._gateway.config.queue, self._gateway.run
        file = StoredFile(
            id=self._file_id,
            expires_at=0.0,
            size=self.size,
            chunks=stored_files.num_chunks(self.size),
            filename=self._filename,
            purpose=stored_files.OUTPUT_PURPOSE,
            created_at=int(time.time()),
        )
        # No quota here: BatchRun limits the size of a batch's output.
        await run(stored_files.begin(queue, self._tenant, file, max_files=1 << 31, max_bytes=1 << 50))
        self._spool.seek(0)
        for number in range(file.chunks):
            await run(stored_files.write(queue, self._tenant, file.id, number, self._spool.read(CHUNK_BYTES)))
        if await run(stored_files.finish(queue, self._tenant, file.id, ttl_s)) is None:
            raise QueueFull(f"{file.id} could not be kept")
        return file.id
