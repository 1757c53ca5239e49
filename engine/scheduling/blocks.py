"""Blocks of the pool and of the host tier."""

from __future__ import annotations

import sys
from collections.abc import Hashable


class KVBlock:
    """One block of the pool. All are created at startup, none while the engine runs."""

    __slots__ = (
        "block_hash",
        "block_id",
        "group",
        "is_reserved",
        "last_step_id",
        "next_free",
        "num_filled",
        "prev_free",
        "ref_count",
    )

    def __init__(self, block_id: int) -> None:
        self.block_id = block_id
        self.group = 0
        """The group of layers whose keys and values it holds."""
        self.ref_count = 0
        self.block_hash: bytes | None = None
        self.num_filled = 0
        """Slots written, or to be written by a step already planned."""
        self.last_step_id = -1
        """The newest step that referenced it for a holder that has since released it."""
        self.is_reserved = False
        self.prev_free: KVBlock | None = None
        self.next_free: KVBlock | None = None

    def __repr__(self) -> str:
        return f"KVBlock({self.block_id}, ref_count={self.ref_count}, hashed={self.block_hash is not None})"


class HostBlock:
    """A block of host memory that holds, or is about to receive, the contents of a device block."""

    __slots__ = ("host_id", "key", "step_id")

    def __init__(self, host_id: int, key: Hashable) -> None:
        self.host_id = host_id
        self.key = key
        self.step_id = sys.maxsize
        """The step whose plan copies the contents here; later than any step until a plan does."""
