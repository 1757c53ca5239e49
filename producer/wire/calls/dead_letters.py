"""Dead letters as calls: jobs that used up their attempts, or kept killing workers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.checkpoints import partial_outputs
from pagemill.producer.wire.schema.outputs import ErrorInfo, Output, WireModel
from pagemill.producer.wire.server.scripts import Call

PAGE_LETTERS = 250


class DeadLetter(WireModel):
    """A dead job, kept for 14 days or until it is purged."""

    id: str
    queue: str
    tenant: str
    model: str
    priority: str
    code: str
    """attempts_exhausted or crash_suspect."""
    cause: str = ""
    """The error code of the last attempt, if attempts were used up."""
    message: str
    created_at: float
    died_at: float
    attempts: int = 0
    """Executions that ended in the job's own retryable error."""
    crashes: int = 0
    """Workers that died while running it without making progress."""
    batch: str | None = None
    key: str | None = None
    metadata: dict[str, Any] | None = None
    replayed_as: str | None = None
    """The job of its last replay."""

    def matches(self, error: str | None) -> bool:
        """Return whether `error` is the letter's code or cause; None matches all."""
        return error is None or error in (self.code, self.cause)


@dataclass(frozen=True, slots=True)
class OpenedLetter:
    """A dead letter with its contents."""

    letter: DeadLetter
    payload: bytes
    """The envelope; empty if it is gone."""
    partial: tuple[Output, ...]
    """The partial output of its executions."""


@dataclass(frozen=True, slots=True)
class LetterPage:
    """A page of letters. `seen` letters were examined; those that are gone by now are left out."""

    seen: int
    letters: list[DeadLetter]


def page(queue: str, skip: int) -> Call[LetterPage]:
    """Return some letters, the latest death first."""
    return Call("dead_list", (keys.prefix(queue),), (skip, PAGE_LETTERS), partial(_page, queue))


def open_letters(queue: str, job_ids: Sequence[str]) -> Call[list[OpenedLetter | None]]:
    """Return one letter per id; None for a job that is not dead."""
    return Call("dead_show", (keys.prefix(queue),), tuple(job_ids), partial(_opened, queue))


def purge(queue: str, job_ids: Sequence[str]) -> Call[int]:
    """Delete letters; returns the number that existed."""
    return Call("dead_purge", (keys.prefix(queue),), tuple(job_ids), int)


def _page(queue: str, reply: list[Any]) -> LetterPage:
    seen, rows = reply
    return LetterPage(seen, [_letter(queue, row) for row in rows])


def _opened(queue: str, reply: list[Any]) -> list[OpenedLetter | None]:
    return [
        OpenedLetter(_letter(queue, row[0]), row[1], partial_outputs(row[0][0].decode(), row[2]))
        if row
        else None
        for row in reply
    ]


def _letter(queue: str, row: list[bytes]) -> DeadLetter:
    job_id, died_at, lane, created_at, attempts, crashes, batch, key, replayed_as, metadata, out = row
    _, priority, tenant, model = keys.split_lane(lane.decode())
    error = ErrorInfo.model_validate_json(out) if out else ErrorInfo(code="", message="")
    return DeadLetter(
        id=job_id.decode(),
        queue=queue,
        tenant=tenant,
        model=model,
        priority=priority,
        code=error.code,
        cause=error.cause,
        message=error.message,
        created_at=int(created_at) / 1000,
        died_at=int(died_at) / 1000,
        attempts=int(attempts or 0),
        crashes=int(crashes or 0),
        batch=batch.decode() or None,
        key=key.decode() or None,
        metadata=json.loads(metadata) if metadata else None,
        replayed_as=replayed_as.decode() or None,
    )
