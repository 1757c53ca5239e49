"""Lifetime, idle time and reuse of KV blocks, measured on a sample of the pool."""

from __future__ import annotations

import time

from pagemill.engine.outputs import Histogram, HistogramSnapshot, LabelValues

SAMPLE = 64
"""One block in this many is timed, always the same ones: block ids have no meaning, so the sample is fair."""
RESIDENCY_BUCKETS = (
    0.001,
    0.005,
    0.01,
    0.05,
    0.1,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    120.0,
    300.0,
    600.0,
    1800.0,
)


class BlockResidency:
    """Receives the pool's events for the sampled blocks.

    A block lives from its allocation until its contents no longer exist: evicted, or freed without a hash. It is
    idle while it is cached and has no reference.
    """

    def __init__(self) -> None:
        self._born: dict[int, float] = {}
        self._idle_since: dict[int, float] = {}
        self._lifetime = Histogram(RESIDENCY_BUCKETS)
        self._idle = Histogram(RESIDENCY_BUCKETS)
        self._reuse_gap = Histogram(RESIDENCY_BUCKETS)

    @staticmethod
    def is_sampled(block_id: int) -> bool:
        return block_id % SAMPLE == 1

    def allocated(self, block_id: int) -> None:
        """Record that the block gets new contents; any previous ones are evicted."""
        now = time.monotonic()
        idle_since = self._idle_since.pop(block_id, None)
        if idle_since is not None:
            self._idle.observe(now - idle_since)
            self._lifetime.observe(now - self._born[block_id])
        self._born[block_id] = now

    def reused(self, block_id: int) -> None:
        """Record that a prefix hit reused an idle block."""
        idle_since = self._idle_since.pop(block_id, None)
        if idle_since is not None:
            self._reuse_gap.observe(time.monotonic() - idle_since)

    def released(self, block_id: int, *, is_cached: bool) -> None:
        """Record that the last reference was dropped."""
        now = time.monotonic()
        if is_cached:
            self._idle_since[block_id] = now
        else:
            self._lifetime.observe(now - self._born[block_id])

    def forgotten(self, block_id: int) -> None:
        """Record that an idle block lost its hash, so its contents cannot be used any more."""
        if self._idle_since.pop(block_id, None) is not None:
            self._lifetime.observe(time.monotonic() - self._born[block_id])

    def histograms(self) -> dict[str, dict[LabelValues, HistogramSnapshot]]:
        return {
            "block_lifetime_seconds": {(): self._lifetime.snapshot()},
            "block_idle_seconds": {(): self._idle.snapshot()},
            "block_reuse_gap_seconds": {(): self._reuse_gap.snapshot()},
        }
