"""The server's memory: its use, and the kinds of data in it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map

DEFAULT_SHARE = 0.85
"""Share of maxmemory up to which jobs are accepted; the rest is for the output of running jobs."""
WARNING = 0.1
"""From this share of maxmemory below that limit on, memory counts as short, and the queue warns."""

Kind: TypeAlias = Literal["payloads", "results", "checkpoints", "dead_letters", "files", "records", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SAMPLE = 64
"""Number of keys that one call reads."""
_CALLS = 8

REMEDIES: Mapping[Kind, str] = {
    "payloads": "pagemill queue limit --jobs N --queue {queue}",
    "results": "pagemill batch ack ID --queue {queue} (IDs: pagemill batch list)",
    "checkpoints": "pagemill workers --queue {queue}",
    "dead_letters": "pagemill dead purge --all --queue {queue}",
    "files": "pagemill batch list --queue {queue}",
    "records": "pagemill batch ack ID --queue {queue} (IDs: pagemill batch list)",
    "other": "redis-cli --memkeys",
}
"""The command that shows or frees the memory of each kind of data."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The server's memory and the queue's limit on it."""

    used: int = 0
    """Bytes, without those that the server itself does not count against maxmemory."""
    most: int = 0
    """Its maxmemory; 0 if it has none, or does not report it."""
    share: float = DEFAULT_SHARE
    """Share of maxmemory up to which jobs are accepted."""
    refused: int = 0
    """Jobs and files rejected for lack of memory since the queue was created; repeated attempts count again."""

    @classmethod
    def parse(cls, reply: list[Any]) -> MemoryUse:
        found = as_map(reply)
        return cls(int(found["used"]), int(found["most"]), float(found["share"]), found["refused"])

    @property
    def is_refusing(self) -> bool:
        """Return whether jobs are rejected for lack of memory."""
        return self.most > 0 and self.used >= self.share * self.most

    @property
    def is_near(self) -> bool:
        """Return whether memory is near or at the limit."""
        return self.most > 0 and self.used > (self.share - WARNING) * self.most


NO_MEMORY_LIMIT = MemoryUse()
SAMPLE_RIGHTS = "+randomkey +memory|usage"
"""Optional ACL rules that `memory_sample` requires."""


def memory_sample(queue: str) -> Call[dict[Kind, int]]:
    """Return the bytes of some of the server's keys, chosen at random, by kind."""
    return Call("memory_sample", (keys.prefix(queue),), (_SAMPLE,), _kinds)


def shares(run: Callable[[Call[dict[Kind, int]]], dict[Kind, int]], queue: str) -> dict[Kind, float]:
    """Estimate the share of each kind in the server's data, from a sample of 512 keys; {} for an empty server."""
    found: Counter[Kind] = Counter()
    for _ in range(_CALLS):
        found.update(run(memory_sample(queue)))
    total = found.total()
    return {kind: found[kind] / total for kind in KINDS} if total else {}


def largest(shares: Mapping[Kind, float]) -> Kind | None:
    """Return the kind with most data; None if unknown."""
    return max(shares.items(), key=lambda item: item[1])[0] if shares else None


def _kinds(reply: list[int]) -> dict[Kind, int]:
    return dict(zip(KINDS, reply, strict=True))
