"""Messages between rank 0 and the other ranks before the first step. After it, only plans are sent."""

from __future__ import annotations

from dataclasses import dataclass

from pagemill.engine.config import EngineConfig


@dataclass(frozen=True, slots=True)
class LoadShare:
    """Command to load a rank's share of the model. The reply is `Loaded`."""

    config: EngineConfig
    rank: int
    rendezvous: str
    """The file at which the ranks meet."""


@dataclass(frozen=True, slots=True)
class Loaded:
    num_kv_blocks: int
    """Number of blocks that fit on the rank's device; the smallest number determines the pool."""
    num_host_blocks: int


@dataclass(frozen=True, slots=True)
class Ready:
    """The rank is ready for plans. Before this message, it received the resolved `SchedulerConfig`."""

    weight_bytes: int


@dataclass(frozen=True, slots=True)
class Failed:
    """The rank failed to start, and has exited."""

    message: str
    is_config_error: bool
