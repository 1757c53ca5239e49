"""Maps of the block pool, created only while a viewer requests them."""

from __future__ import annotations

import time
from collections.abc import Callable

from pagemill.engine.outputs import BlockMap

MIN_INTERVAL_S = 0.4
COST_SHARE = 0.01
"""The largest share of the engine's time spent on maps: a pool of a million blocks is sampled less often."""


class BlockWatch:
    """Creates a map at most every `MIN_INTERVAL_S`, while requested. Used only on the engine's thread."""

    def __init__(self, read_states: Callable[[], bytes]) -> None:
        """`read_states` walks the pool: one letter per block, as in `BlockMap.states`."""
        self._read_states = read_states
        self._watched_until = 0.0
        self._due_at = 0.0
        self._latest: BlockMap | None = None

    def watch_for(self, seconds: float) -> None:
        """Request maps for the next `seconds`."""
        self._watched_until = time.monotonic() + seconds

    def observe(self) -> None:
        """Create a map if one is requested and due. Call it in every step, once its blocks are allocated."""
        now = time.monotonic()
        if now >= self._watched_until:
            self._latest = None
        elif now >= self._due_at:
            self._latest = BlockMap(self._read_states(), now)
            self._due_at = now + max(MIN_INTERVAL_S, (time.monotonic() - now) / COST_SHARE)

    @property
    def latest(self) -> BlockMap | None:
        """The latest map; None unless requested."""
        return self._latest
