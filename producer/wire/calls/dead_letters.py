"""Dead letters as calls: jobs that used up their attempts, or repeatedly crashed workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.checkpoints import partial_outputs
from pagemill.producer.wire.schema.outputs import ErrorInfo, Output, WireModel
from pagemill.producer.wire.schema.sealing import opened_metadata
from pagemill.producer.wire.server.scripts import Call, as_map

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
    """Workers that crashed while running it without making progress."""
    batch: str | None = None
    key: str | None = None
    metadata: dict[str, Any] | None = None
    replayed_as: str | None = None
    """The job of its last replay."""

    def matches(self, error: str | None) -> bool:
        """Return whether the letter has an error.

        Args:
            error: an error code or cause; None matches every letter.

        Returns:
            True if `error` is the letter's code or cause.
        """
        return error is None or error in (self.code, self.cause)


@dataclass(frozen=True, slots=True)
class OpenedLetter:
    """A dead letter with its contents."""

    letter: DeadLetter
    payload: bytes
    """The envelope; empty if it no longer exists."""
    partial: tuple[Output, ...]
    """The partial output of its executions."""


@dataclass(frozen=True, slots=True)
class LetterPage:
    """A page of letters. `seen` letters were read; those deleted meanwhile are left out."""

    seen: int
    letters: list[DeadLetter]


def page(queue: str, skip: int) -> Call[LetterPage]:
    """Return some letters, the latest first."""
    return Call("dead_list", (keys.prefix(queue),), (skip, PAGE_LETTERS), partial(_page, queue))


def open_letters(queue: str, job_ids: Sequence[str]) -> Call[list[OpenedLetter | None]]:
    """Return one letter per id; None for a job that is not dead."""
    return Call("dead_show", (keys.prefix(queue),), tuple(job_ids), partial(_opened, queue))


def purge(queue: str, job_ids: Sequence[str]) -> Call[int]:
    """Delete letters; returns the number that existed."""
    return Call("dead_purge", (keys.prefix(queue),), tuple(job_ids), int)


def _page(queue: str, reply: list[Any]) -> LetterPage:
    seen, rows, *_ = reply
    return LetterPage(seen, [_letter(queue, row) for row in rows])


def _opened(queue: str, reply: list[Any]) -> list[OpenedLetter | None]:
    return [
        OpenedLetter(_letter(queue, row[0]), row[1], partial_outputs(as_map(row[0])["id"].decode(), row[2]))
        if row
        else None
        for row in reply
    ]


def _letter(queue: str, row: list[bytes]) -> DeadLetter:
    found = as_map(row)
    text = {name: value.decode() for name, value in found.items()}
    _, priority, tenant, model = keys.split_lane(text["lane"])
    error = ErrorInfo.model_validate_json(text["error"]) if text["error"] else ErrorInfo(code="", message="")
    return DeadLetter(
        id=text["id"],
        queue=queue,
        tenant=tenant,
        model=model,
        priority=priority,
        code=error.code,
        cause=error.cause,
        message=error.message,
        created_at=int(text["created_at"]) / 1000,
        died_at=int(text["died_at"]) / 1000,
        attempts=int(text.get("attempts", 0)),
        crashes=int(text.get("crashes", 0)),
        batch=text.get("batch"),
        key=text.get("key"),
        metadata=opened_metadata(text.get("metadata", "").encode(), text["id"]),
        replayed_as=text.get("replayed_as"),
    )
