"""Batches as calls: counts, the feed of ends, acknowledging, cancelling.

A cursor is `e<n>` (after the n-th end, in the order ends came) or `s<n>` (after the n-th submit).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from pagemill.producer.wire.calls.reads import read_outcome
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.outputs import BatchCounts, BatchItem
from pagemill.producer.wire.server.scripts import Call

PAGE_JOBS = 250
PAGE_BYTES = 1 << 20
"""A page of results ends after so many bytes; one result may be larger."""


@dataclass(frozen=True, slots=True)
class Page:
    """Some ends, and the position to read on from."""

    position: int
    items: list[BatchItem]


def counts(queue: str, batch_id: str) -> Call[BatchCounts | None]:
    """Jobs by state; None for an unknown batch."""
    return Call("batch_counts", (keys.prefix(queue),), (batch_id,), _counts)


def page(queue: str, batch_id: str, position: int, *, ordered: bool) -> Call[Page]:
    """The next ends. Ordered: in the order of the submits, up to the first job that has not ended."""
    script, letter = ("batch_ordered", "s") if ordered else ("batch_feed", "e")
    args = (batch_id, position, PAGE_JOBS, PAGE_BYTES)
    return Call(script, (keys.prefix(queue),), args, partial(_page, letter))


def ack(queue: str, batch_id: str, cursor: str, start: int) -> Call[tuple[int, int]]:
    """Free a slice of jobs up to `cursor`; returns how many, and the position reached. Repeat until there."""
    letter, position = split_cursor(cursor)
    args = (batch_id, letter, position, PAGE_JOBS, start)
    return Call("batch_ack", (keys.prefix(queue),), args, tuple)


def cancel(queue: str, batch_id: str, start: int) -> Call[tuple[int, int]]:
    """Cancel a slice of jobs from `start` on; returns how many were stopped, and how many looked at."""
    return Call("batch_cancel", (keys.prefix(queue),), (batch_id, start, PAGE_JOBS), tuple)


def split_cursor(cursor: str) -> tuple[str, int]:
    """The letter and the position of a cursor."""
    letter, digits = cursor[:1], cursor[1:]
    if letter not in ("e", "s") or not (digits.isascii() and digits.isdigit()):
        raise InvalidJob("a cursor is what BatchItem.cursor said: e or s, and a number")
    return letter, int(digits)


def _counts(reply: Any) -> BatchCounts | None:
    if not reply:
        return None
    flat = list(reply)
    values = {name.decode(): int(value) for name, value in zip(flat[::2], flat[1::2], strict=True)}
    return BatchCounts(**{name: values.get(name, 0) for name in BatchCounts.model_fields})


def _page(letter: str, reply: list[Any]) -> Page:
    position, rows = reply
    items = []
    for at, record in rows:
        outcome = read_outcome(record)
        items.append(
            BatchItem(
                id=outcome.job_id,
                key=outcome.key,
                metadata=outcome.metadata,
                cursor=f"{letter}{at}",
                state=outcome.state,  # type: ignore[arg-type]
                result=outcome.result,
                error=outcome.error,
            )
        )
    return Page(position, items)
