"""Listing, replaying and purging dead letters, as flows (see effects.py)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.client import flows
from pagemill.producer.client.effects import Emit, Flow, Sync
from pagemill.producer.client.preparer import Preparer, opened_envelope
from pagemill.producer.client.submit_flow import CHUNK_JOBS, send, upload
from pagemill.producer.wire.calls import dead_letters, submissions
from pagemill.producer.wire.calls.dead_letters import DeadLetter, LetterPage, OpenedLetter
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.errors import InvalidJob, JobNotFound, QueueFull, StoreError
from pagemill.producer.wire.schema.signing import OUTPUT_SEPARATOR, split_payload

OPEN_AT_ONCE = 8
"""Letters whose payloads are read in one call: up to a megabyte each. Those in a store are read one at a time."""


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """A filter for letters: by error (None: any), and optionally only those that were replayed."""

    error: str | None = None
    replayed: bool = False

    def covers(self, letter: DeadLetter) -> bool:
        return letter.matches(self.error) and (letter.replayed_as is not None or not self.replayed)


@dataclass(frozen=True, slots=True)
class Replay:
    """The outcome of replaying dead jobs; each job's id is in exactly one of the three."""

    jobs: dict[str, str] = field(default_factory=dict)
    """Maps a dead job to the new job."""
    already: dict[str, str] = field(default_factory=dict)
    """Maps a dead job to the job of its earlier replay, or to the one that now has its idempotency key."""
    refused: dict[str, str] = field(default_factory=dict)
    """Maps a dead job to the reason why it cannot run again."""


def letters(queue: str, error: str | None) -> Flow[None]:
    """Emit DeadLetters, the latest first."""
    reader = _Reader(queue)
    while (page := (yield from reader.next_page())) is not None:
        for letter in page:
            if letter.matches(error):
                yield Emit(letter)


def show(queue: str, job_id: str) -> Flow[OpenedLetter]:
    """Return one letter. Raises JobNotFound."""
    found: list[OpenedLetter | None] = yield dead_letters.open_letters(queue, [job_id])
    if found[0] is None:
        raise JobNotFound(f"no dead job {job_id}: it lives, ended otherwise, or was purged")
    return found[0]


def replay(queue: str, preparer: Preparer, job_ids: Sequence[str] | None, error: str | None) -> Flow[Replay]:
    """Resubmit dead jobs in the order of death: the given ones, or all (with the error). Raises QueueFull."""
    done = Replay()
    wanted = yield from _choose(queue, job_ids, LetterFilter(error))
    for start in range(0, len(wanted), OPEN_AT_ONCE):
        ids = wanted[start : start + OPEN_AT_ONCE]
        opened: list[OpenedLetter | None] = yield dead_letters.open_letters(queue, ids)
        items: list[tuple[str, Submission]] = []
        for job_id, letter in zip(ids, opened, strict=True):
            item = yield from _prepared(preparer, job_id, letter, done)
            if item is not None and item.upload is not None:
                yield from _submit(queue, [(job_id, item)], done)
            elif item is not None:
                items.append((job_id, item))
        yield from _submit(queue, items, done)
    yield Sync()
    return done


def purge(queue: str, job_ids: Sequence[str] | None, wanted: LetterFilter) -> Flow[int]:
    """Delete dead jobs: the given ones, or all that are wanted; returns their number."""
    chosen = yield from _choose(queue, job_ids, wanted)
    purged = 0
    for start in range(0, len(chosen), CHUNK_JOBS):
        count: int = yield dead_letters.purge(queue, chosen[start : start + CHUNK_JOBS])
        purged += count
    return purged


def submitted_fields(payload: bytes, job_id: str) -> dict[str, Any] | None:
    """Return the job as submitted; None if it cannot be read."""
    try:
        fields = json.loads(opened_envelope(split_payload(payload).envelope, job_id))
    except (ValueError, RecursionError):
        return None
    return fields if isinstance(fields, dict) else None


def _choose(queue: str, job_ids: Sequence[str] | None, wanted: LetterFilter) -> Flow[list[str]]:
    """Return the ids to process, the oldest death first. All are read before any is changed."""
    if job_ids is not None:
        return list(dict.fromkeys(job_ids))
    chosen: list[str] = []
    reader = _Reader(queue)
    while (page := (yield from reader.next_page())) is not None:
        chosen += [letter.id for letter in page if wanted.covers(letter)]
    return chosen[::-1]


class _Reader:
    """Reads the dead letters page by page, each once, although new ones shift letters to the next page."""

    def __init__(self, queue: str) -> None:
        self._queue = queue
        self._skip = 0
        self._seen: set[str] = set()

    def next_page(self) -> Flow[list[DeadLetter] | None]:
        """Return the next page, None after the last one."""
        page: LetterPage = yield dead_letters.page(self._queue, self._skip)
        if page.seen == 0:
            return None
        self._skip += page.seen
        fresh = [letter for letter in page.letters if letter.id not in self._seen]
        self._seen.update(letter.id for letter in fresh)
        return fresh


def _prepared(
    preparer: Preparer, job_id: str, letter: OpenedLetter | None, done: Replay
) -> Flow[Submission | None]:
    """Return the submission that replays a letter, read from its store if necessary; None if it is rejected."""
    if letter is None:
        done.refused[job_id] = "no dead job of that id"
        return None
    try:
        parts = split_payload(letter.payload)
        envelope = yield from flows.full_envelope(parts.envelope)
        return preparer.replay(OUTPUT_SEPARATOR.join((envelope, *parts.outputs)), job_id)
    except (InvalidJob, StoreError) as error:
        done.refused[job_id] = str(error)
        return None


def _submit(queue: str, items: Sequence[tuple[str, Submission]], done: Replay) -> Flow[None]:
    """Submit replays, each with the id of its dead job. Raises QueueFull."""
    if not items:
        return
    jobs = [item for _, item in items]
    yield from upload(queue, jobs)
    replies = yield from send(submissions.submit(queue, jobs))
    for (dead_id, _), reply in zip(items, replies, strict=True):
        _note(done, dead_id, reply)


def _note(done: Replay, dead_id: str, reply: submissions.SubmitReply) -> None:
    match reply.status:
        case "created" | "exists":
            done.jobs[dead_id] = reply.job_id
        case "same":
            done.already[dead_id] = reply.job_id
        case "full" | "memory" | "purging":
            raise QueueFull(
                "the queue accepts no more jobs; call replay again for the remaining letters",
                reason="memory" if reply.status == "memory" else "jobs",
            )
        case "gone":
            done.refused[dead_id] = "it was purged meanwhile"
        case "conflict":
            done.refused[dead_id] = f"its idempotency key belongs to job {reply.job_id} now"
        case "too_large":
            done.refused[dead_id] = "its payload is larger than the queue takes now"
