"""Waiters of a job, counted on the server: a job submitted with a `waiter` ends when the last one leaves.

A submission under a known idempotency key waits for the job that has it. After a submission without a waiter,
which may wait forever, and beyond about 70 waiters, the job no longer ends when waiters leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pagemill.producer.wire.calls.transitions import parse_words
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call

HangUpReply = Literal["cancelled", "requested", "done", "missing", "kept"]


def hang_up(queue: str, waiter: str, job_ids: Sequence[str]) -> Call[list[HangUpReply]]:
    """Stop waiting for some jobs. A job without another waiter ends as by `cancel`; any other is `kept`."""
    return Call("hang_up", (keys.prefix(queue),), (waiter, *job_ids), parse_words)
