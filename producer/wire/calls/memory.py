"""The server's memory: how much of it is in use, and which kinds of data hold it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, get_args

from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.server.scripts import Call, as_map

DEFAULT_SHARE = 0.85
"""Of maxmemory, up to which jobs are taken; the rest is for what running jobs write."""
WARNING = 0.1
"""From this much of maxmemory below that share on, memory counts as short, and the queue warns."""

Kind: TypeAlias = Literal["payloads", "results", "checkpoints", "dead_letters", "files", "records", "other"]
KINDS: tuple[Kind, ...] = get_args(Kind)
_SAMPLE = 64
"""Keys that one call looks at."""
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
"""The command that shows, or makes, room where a kind of data holds most of the memory."""


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """The server's memory and the queue's limit of it."""

    used: int = 0
    """Bytes, without what the server does not count against maxmemory itself."""
    most: int = 0
    """Its maxmemory; 0: it has none, or does not report it."""
    share: float = DEFAULT_SHARE
    """Of maxmemory, up to which jobs are taken."""
    refused: int = 0
    """Jobs and files refused for lack of memory since the queue exists; repeated attempts count again."""

    @classmethod
    def parse(cls, reply: list[Any]) -> MemoryUse:
        found = as_map(reply)
        return cls(int(found["used"]), int(found["most"]), float(found["share"]), found["refused"])

    @property
    def is_refusing(self) -> bool:
        """Return whether jobs are refused for lack of memory."""
        return self.most > 0 and self.used >= self.share * self.most

    @property
    def is_near(self) -> bool:
        """Return whether memory is short: near the limit, or at it."""
        return self.most > 0 and self.used > (self.share - WARNING) * self.most


NO_MEMORY_LIMIT = MemoryUse()
SAMPLE_RIGHTS = "+randomkey +memory|usage"
"""Optional ACL rules, without which `memory_sample` is refused."""


def memory_sample(queue: str) -> Call[dict[Kind, int]]:
    """Return the bytes of some of the server's keys, chosen at random, by kind."""
    return Call("memory_sample", (keys.prefix(queue),), (_SAMPLE,), _kinds)


def shares(run: Callable[[Call[dict[Kind, int]]], dict[Kind, int]], queue: str) -> dict[Kind, float]:
    """Estimate which share of the server's data each kind is, from a sample of 512 keys; {} of an empty server."""
    found: Counter[Kind] = Counter()
    for _ in range(_CALLS):
        found.update(run(memory_sample(queue)))
    total = found.total()
    return {kind: found[kind] / total for kind in KINDS} if total else {}


def largest(shares: Mapping[Kind, float]) -> Kind | None:
    """Return the kind that holds most; None if nothing is known."""
    return max(shares.items(), key=lambda item: item[1])[0] if shares else None


def _kinds(reply: list[int]) -> dict[Kind, int]:
    return dict(zip(KINDS, reply, strict=True))
