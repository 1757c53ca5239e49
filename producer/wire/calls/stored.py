"""Files of the store as calls: files to be written, and files to be deleted."""

from __future__ import annotations

from collections.abc import Sequence

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call

GRACE_MS = 3_600_000
"""Time after which an announced file is deleted unless it is part of a job."""


def announce(queue: str, uris: Sequence[str], within_ms: int = GRACE_MS) -> Call[int]:
    """Have files deleted in `within_ms`, unless a submission or a commit references them by then."""
    return Call("stored_announce", (keys.prefix(queue),), (within_ms, *uris), int)


def claim(queue: str, limit: int, claim_ms: int) -> Call[list[str]]:
    """Claim up to `limit` files to delete; they become due again after `claim_ms` unless settled."""
    return Call(
        "stored_claim",
        (keys.prefix(queue),),
        (limit, claim_ms),
        lambda reply: [uri.decode() for uri in reply],
    )


def forget(queue: str, uris: Sequence[str]) -> Call[int]:
    """Remove deleted files from the list."""
    return Call("stored_settle", (keys.prefix(queue),), tuple(uris), int)
