"""The groups of layers that share the pool, by their windows: table layout and window retention.

A column of a block table is a sequence's blocks of the same tokens, one per group, side by side: entry
`column * groups + group`. Columns of a group that no query can read any more hold the null block.
"""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.config import SchedulerConfig
from pagemill.kernels.types.window import first_visible

_SLACK = 3
"""Blocks in addition to window and chunk: partial ones at both ends, and those freed with the next full block."""


@dataclass(frozen=True, slots=True)
class BlockGroups:
    """Windows by group, in the format of `first_visible`; None: the group's layers read everything."""

    block_size: int
    windows: tuple[int | None, ...] = (None,)
    max_chunk: int = 2**31
    """Maximum number of tokens of a sequence in a step."""

    @classmethod
    def from_config(cls, config: SchedulerConfig) -> BlockGroups:
        chunk = min(config.max_num_batched_tokens, config.long_prefill_token_threshold or 2**31)
        return cls(config.block_size, config.kv_windows, chunk)

    @property
    def num_groups(self) -> int:
        return len(self.windows)

    @property
    def has_windows(self) -> bool:
        return self.windows != (None,)

    def columns(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def first_read(self, window: int | None, position: int) -> int:
        """Return the first column that the query at a position, or any after it, reads."""
        first: int = first_visible(window or 0, position)
        return max(0, first) // self.block_size

    def most_held(self, window: int | None, num_columns: int) -> int:
        """Return a bound on the blocks that a sequence of this many columns holds at the same time in a group."""
        if window is None:
            return num_columns
        return min(num_columns, (abs(window) + self.max_chunk) // self.block_size + _SLACK)

    @property
    def limits(self) -> tuple[int | None, ...]:
        """Maximum number of blocks that a sequence holds at the same time in each group; None: one per column."""
        return tuple(None if window is None else self.most_held(window, 2**31) for window in self.windows)

    def key(self, block_hash: bytes, group: int) -> bytes:
        """Return the key of a group's block, from the hash of its column's prefix."""
        return block_hash if len(self.windows) == 1 else block_hash + bytes((group,))
