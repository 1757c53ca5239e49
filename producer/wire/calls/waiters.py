"""Who waits for a job, counted on the server: a job that was submitted with a `waiter` ends when the last one leaves.

Whoever submits under an idempotency key that is known waits for the job that has it. One that names no waiter may
wait for ever, so then, and beyond some 70 waiters, the job is not ended by anybody's leaving.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pagemill.producer.wire.calls.transitions import words
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call

HangUpReply = Literal["cancelled", "requested", "done", "missing", "kept"]


def hang_up(queue: str, waiter: str, job_ids: Sequence[str]) -> Call[list[HangUpReply]]:
    """Wait no longer for some jobs. One that nobody else waits for ends as by `cancel`; any other is `kept`."""
    return Call("hang_up", (keys.prefix(queue),), (waiter, *job_ids), words)
