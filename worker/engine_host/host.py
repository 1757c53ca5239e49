"""The interface between the worker's threads and its engine."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.config import SchedulerConfig
from pagemill.engine.errors import EngineError
from pagemill.engine.outputs import Capacity, EngineStats, RequestOutput
from pagemill.engine.parts import Tier
from pagemill.engine.text.token_texts import TokenTexts
from pagemill.engine.text.tokenizer import Tokenizer
from pagemill.worker.engine_host.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineState,
    Report,
    SetHeld,
    WatchBlocks,
)

if TYPE_CHECKING:
    from pagemill.engine.pooling.input_processor import PoolingInputProcessor
    from pagemill.engine.text.input_processor import InputProcessor

Deliver = Callable[[list[RequestOutput]], None]


class AdapterNames(Protocol):
    """The adapters that jobs may name, in the form of `AdapterPool`. For any thread."""

    def add(self, name: str, directory: Path) -> Adapter | None: ...

    def remove(self, name: str) -> None: ...

    def find(self, name: str) -> Adapter: ...

    def registered(self) -> list[Adapter]: ...


class EngineFace(Protocol):
    """Properties of an engine: constant once it is loaded, except for the names of adapters. For any thread."""

    @property
    def served_models(self) -> tuple[str, ...]: ...

    @property
    def fingerprint(self) -> str: ...

    @property
    def model_parts(self) -> str: ...

    @property
    def tier(self) -> Tier: ...

    @property
    def tokenizer(self) -> Tokenizer | None: ...

    @property
    def lacks(self) -> frozenset[str]:
        """The abilities that it does not have, under their names in jobs' lanes."""
        ...

    @property
    def token_texts(self) -> TokenTexts: ...

    @property
    def adapters(self) -> AdapterNames: ...

    @property
    def limits(self) -> SchedulerConfig: ...

    @property
    def input_processor(self) -> InputProcessor | PoolingInputProcessor:
        """The part of the engine that tokenizes and validates."""
        ...


class EngineHost(ABC):
    """Runs an engine. `deliver` is called on a thread of the host and must not block.

    A request that the engine rejects is delivered as a finished output with an error code; `add` itself never fails.
    """

    def __init__(self, deliver: Deliver) -> None:
        self._deliver = deliver
        self._loaded = threading.Event()
        self._capacity: Capacity | None = None
        self._stats: EngineStats | None = None
        self._progress_at = time.monotonic()
        self.state = EngineState.LOADING
        self.error: BaseException | None = None

    pid: int | None = None
    """The engine's process, if it is separate and started."""

    @abstractmethod
    def start(self) -> None:
        """Start to load the model."""

    @abstractmethod
    def stop(self, timeout: float) -> bool:
        """Ask the loop to exit after its step; True if it exits within `timeout` seconds."""

    @property
    @abstractmethod
    def engine(self) -> EngineFace:
        """The loaded engine, as other threads may see it."""

    @property
    @abstractmethod
    def is_alive(self) -> bool: ...

    @abstractmethod
    def lost_rank(self) -> str | None:
        """The crashed process of a model spread over several; None if all are alive."""

    @abstractmethod
    def _send(self, command: Command) -> None: ...

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Return True once the model is loaded. Raises the EngineError if loading failed."""
        self._loaded.wait(timeout)
        if isinstance(self.error, EngineError):
            raise self.error
        return self.error is None and self._loaded.is_set()

    def add(self, request: AddRequest) -> None:
        self._send(request)

    def abort(self, request_id: str) -> None:
        """End the request with finish reason `abort`; unknown ids are ignored."""
        self._send(AbortRequest(request_id))

    def hold(self, held: bool) -> None:
        """Pause stepping, or resume. Requests and aborts are still accepted."""
        self._send(SetHeld(held))

    def watch_blocks(self, seconds: float) -> None:
        """Keep `stats.blocks` fresh for the next `seconds`, at almost no cost to the engine."""
        self._send(WatchBlocks(seconds))

    @property
    def input_processor(self) -> InputProcessor | PoolingInputProcessor:
        """The part of the engine that tokenizes and validates; safe on any thread."""
        return self.engine.input_processor

    @property
    def capacity(self) -> Capacity | None:
        """The engine's headroom after its last step; None until the model is loaded."""
        return self._capacity

    @property
    def stats(self) -> EngineStats | None:
        """The latest snapshot, up to `STATS_INTERVAL_S` old while the engine steps; None while it loads."""
        return self._stats

    def stalled_for(self) -> float:
        """Seconds since the loop last made progress; 0 while loading, idle or held, infinite after a crash."""
        if self.state is EngineState.FAILED:
            return float("inf")
        return time.monotonic() - self._progress_at if self.state is EngineState.RUNNING else 0.0

    def _take(self, report: Report) -> None:
        if report.capacity is not None:
            self._capacity = report.capacity
        if report.stats is not None:
            self._stats = report.stats
        self._progress_at = report.progress_at
        self.state = report.state
        self._loaded.set()
        if report.outputs:
            self._deliver(report.outputs)

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.state = EngineState.FAILED
        self._loaded.set()
        self._deliver([])
