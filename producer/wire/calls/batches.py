"""Batches as calls: counts, the feed of ended jobs, acknowledging, cancelling.

A cursor is `e<n>` (after the n-th end, in order of the ends) or `s<n>` (after the n-th submitted job).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pagemill.producer.wire.calls.reads import Outcome, read_outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.outputs import BatchCounts, BatchInfo, BatchItem
from pagemill.producer.wire.server.scripts import Call, as_map

PAGE_JOBS = 250
LIST_BATCHES = 100
SEVERAL = "*"
"""The owner of a batch with jobs of several tenants."""
PAGE_BYTES = 1 << 20
"""Bytes after which a page of results ends; a single result may be larger."""


@dataclass(frozen=True, slots=True)
class Page:
    """Ended jobs, and the position to continue from."""

    position: int
    items: list[BatchItem]
    stored: dict[int, Outcome] = field(default_factory=dict)
    """The outcomes among them, by index, whose results are in a store."""


def counts(queue: str, batch_id: str) -> Call[BatchCounts | None]:
    """Return the numbers of jobs by state; None for an unknown batch."""
    return Call("batch_counts", (keys.prefix(queue),), (batch_id,), _counts)


def listed(queue: str, start: int, count: int) -> Call[list[BatchInfo]]:
    """Return some batches of the queue, the most recently extended or ended one first."""
    return Call("batch_list", (keys.prefix(queue),), (start, count), _listed)


def page(queue: str, batch_id: str, position: int, *, ordered: bool) -> Call[Page]:
    """Return the next ended jobs. Ordered: in order of submission, up to the first job that has not ended."""
    script, letter = ("batch_ordered", "s") if ordered else ("batch_feed", "e")
    args = (batch_id, position, PAGE_JOBS, PAGE_BYTES)
    return Call(script, (keys.prefix(queue),), args, partial(_page, letter))


def sample(queue: str, batch_id: str, positions: Sequence[int]) -> Call[list[str]]:
    """Return the ids of the jobs at these positions in the order of submission; removed ones are left out."""
    return Call("batch_sample", (keys.prefix(queue),), (batch_id, *positions), _ids)


def ack(queue: str, batch_id: str, cursor: str, start: int) -> Call[tuple[int, int]]:
    """Free a slice of jobs up to `cursor`. Returns their number and the position reached. Repeat until done."""
    letter, position = split_cursor(cursor)
    args = (batch_id, letter, position, PAGE_JOBS, start)
    return Call("batch_ack", (keys.prefix(queue),), args, tuple)


def cancel(queue: str, batch_id: str, start: int) -> Call[tuple[int, int]]:
    """Cancel a slice of jobs from `start` on; returns the numbers of jobs stopped and examined."""
    return Call("batch_cancel", (keys.prefix(queue),), (batch_id, start, PAGE_JOBS), tuple)


def split_cursor(cursor: str) -> tuple[str, int]:
    """Return a cursor's letter and position."""
    letter, digits = (cursor[:1], cursor[1:]) if isinstance(cursor, str) else ("", "")
    if letter not in ("e", "s") or not (digits.isascii() and digits.isdigit()):
        raise InvalidJob("a cursor is the value of BatchItem.cursor: e or s, and a number")
    return letter, int(digits)


def _ids(reply: list[bytes]) -> list[str]:
    return [job_id.decode() for job_id in reply]


def _counts(reply: Any) -> BatchCounts | None:
    if not reply:
        return None
    return _batch_counts(as_map(reply))


def _batch_counts(record: dict[str, bytes]) -> BatchCounts:
    return BatchCounts(**{name: int(record.get(name, 0)) for name in BatchCounts.model_fields})


def _listed(reply: list[Any]) -> list[BatchInfo]:
    found = []
    for row in map(as_map, reply[1:]):
        record, lane = as_map(row["counts"]), row["lane"]
        tenant = row["tenant"].decode() or (keys.split_lane(lane.decode())[2] if lane else None)
        created_at = int(record.get("created_at", 0)) / 1000
        if tenant == SEVERAL:
            tenant = None
        counts = _batch_counts(record)
        found.append(BatchInfo(id=row["id"].decode(), created_at=created_at, counts=counts, tenant=tenant))
    return found


def _page(letter: str, reply: list[Any]) -> Page:
    position, rows, *_ = reply
    items: list[BatchItem] = []
    stored: dict[int, Outcome] = {}
    stored_bytes = 0
    for at, record, *_ in rows:
        outcome = read_outcome(record)
        if outcome.stored is not None:
            stored[len(items)] = outcome
            stored_bytes += outcome.stored.reference.size
        items.append(
            BatchItem(
                id=outcome.job_id,
                key=outcome.key,
                metadata=outcome.metadata,
                cursor=f"{letter}{at}",
                state=outcome.state,  # type: ignore[arg-type]
                result=outcome.result,
                error=outcome.error,
                superseded=outcome.is_superseded,
            )
        )
        if stored_bytes > PAGE_BYTES:
            return Page(at, items, stored)
    return Page(position, items, stored)
