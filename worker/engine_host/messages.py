"""Messages between a worker and its engine: commands in, reports out. Plain and picklable."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.config import EngineConfig
from pagemill.engine.media import MediaItem
from pagemill.engine.outputs import Capacity, EngineStats, RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import GENERATE, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class AddRequest:
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    priority: int = 0
    arrival: float | None = None
    resume: list[SampleState] | None = None
    cache_salt: str = ""
    task: Task = GENERATE
    adapter: Adapter | None = None
    media: tuple[MediaItem, ...] = ()


@dataclass(frozen=True, slots=True)
class AbortRequest:
    request_id: str


@dataclass(frozen=True, slots=True)
class SetHeld:
    held: bool


@dataclass(frozen=True, slots=True)
class WatchBlocks:
    """Keep `stats.blocks` fresh for the next `seconds`, for a viewer of the block pool."""

    seconds: float


@dataclass(frozen=True, slots=True)
class Stop:
    pass


Command = AddRequest | AbortRequest | SetHeld | WatchBlocks | Stop
"""Commands that the loop takes between two steps."""


@dataclass(frozen=True, slots=True)
class ChangeAdapter:
    """For an engine in another process; answered by `AdaptersChanged`. Read while the loop steps."""

    number: int
    action: Literal["add", "remove"]
    name: str
    directory: Path | None = None


class EngineState(enum.Enum):
    LOADING = "loading"
    IDLE = "idle"
    RUNNING = "running"
    HELD = "held"
    """Has work, but was asked not to step."""
    STOPPED = "stopped"
    FAILED = "failed"
    """The loop has stopped permanently because of `EngineHost.error`."""


@dataclass(frozen=True, slots=True)
class Report:
    """The loop's report after a step, and whenever it starts or stops waiting."""

    state: EngineState
    progress_at: float
    """`time.monotonic()`, which all processes of a machine share."""
    num_taken: int
    """Commands taken so far."""
    capacity: Capacity | None = None
    """The headroom after the last step; this and the next: None if unchanged."""
    stats: EngineStats | None = None
    outputs: list[RequestOutput] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class AdaptersChanged:
    number: int
    error: BaseException | None
    named: list[Adapter]


@dataclass(frozen=True, slots=True)
class StartEngine:
    """The first message to an engine's process; the reply is a `ServedModel` or `Failed`."""

    config: EngineConfig
    log_level: str
    log_format: Literal["console", "json"]
    log_fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class Failed:
    """The error that ended the engine, or with which it could not be loaded."""

    error: BaseException


@dataclass(frozen=True, slots=True)
class RankDied:
    """The crashed process of a model spread over several."""

    reason: str
