"""What rank 0 and the other ranks' processes tell each other before the first step. After it, plans alone."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class LoadShare:
    """To a rank: load your share of the model. It answers with `Loaded`."""

    config: EngineConfig
    rank: int
    rendezvous: str
    """The file at which the ranks meet."""


@dataclass(frozen=True, slots=True)
class Loaded:
    num_kv_blocks: int
    """Blocks that fit on the rank's device; the pool is as large as the smallest."""
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank takes plans. It got the resolved `SchedulerConfig` before."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank could not get ready, and has ended."""

    message: str
    is_config_error: bool
