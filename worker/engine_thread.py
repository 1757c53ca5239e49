"""The engine on a thread of its own: commands in, batches of outputs out.

The messages are plain and picklable and the interface does not expose threads, so that an engine in another
process can replace this one.
"""

from __future__ import annotations

import enum
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pagemill.engine.adapters.adapter import Adapter
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import EngineError, InvalidRequest, ModelLoadError
from pagemill.engine.outputs import Capacity, EngineStats, RequestOutput, SampleState
from pagemill.engine.sampling_params import SamplingParams
from pagemill.engine.tasks import GENERATE, Task
from pagemill.worker.device_time import DeviceTime

if TYPE_CHECKING:
    from pagemill.engine.pooling.input_processor import PoolingInputProcessor
    from pagemill.engine.serving import AnyEngine
    from pagemill.engine.text.input_processor import InputProcessor

logger = logging.getLogger(__name__)

STATS_INTERVAL_S = 0.1


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


class Stop:
    pass


Command = AddRequest | AbortRequest | SetHeld | WatchBlocks | Stop


class EngineState(enum.Enum):
    LOADING = "loading"
    IDLE = "idle"
    RUNNING = "running"
    HELD = "held"
    """Has work, but was told not to step."""
    STOPPED = "stopped"
    FAILED = "failed"
    """The loop died of `EngineThread.error`, for good."""


class EngineThread:
    """Runs an engine. `deliver` is called on the engine's thread and must not block.

    A request that the engine refuses comes back through `deliver` as a finished output with an error code;
    `add` itself never fails.
    """

    def __init__(self, config: EngineConfig, deliver: Callable[[list[RequestOutput]], None]) -> None:
        self._config = config
        self._deliver = deliver
        self._inbox: SimpleQueue[Command] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="pagemill-engine", daemon=True)
        self._loaded = threading.Event()
        self._engine: AnyEngine | None = None
        self._held = False
        self._device_time = DeviceTime()
        self._capacity: Capacity | None = None
        self._stats: EngineStats | None = None
        self._stats_at = 0.0
        self._last_progress = time.monotonic()
        self.state = EngineState.LOADING
        self.error: BaseException | None = None

    def start(self) -> None:
        self._thread.start()

    def wait_loaded(self, timeout: float | None = None) -> bool:
        """Return True once the model is loaded. Raises the EngineError that loading failed with, if it did."""
        self._loaded.wait(timeout)
        if isinstance(self.error, EngineError):
            raise self.error
        return self._engine is not None and self._loaded.is_set()

    def add(self, request: AddRequest) -> None:
        self._inbox.put(request)

    def abort(self, request_id: str) -> None:
        """End the request with finish reason `abort`; unknown ids are ignored."""
        self._inbox.put(AbortRequest(request_id))

    def hold(self, held: bool) -> None:
        """Pause stepping, or resume. Requests and aborts are still taken."""
        self._inbox.put(SetHeld(held))

    def watch_blocks(self, seconds: float) -> None:
        """Keep `stats.blocks` fresh for the next `seconds`, at almost no cost to the engine."""
        self._inbox.put(WatchBlocks(seconds))

    def stop(self, timeout: float) -> bool:
        """Ask the loop to exit after its step; True if it did within `timeout` seconds."""
        self._inbox.put(Stop())
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def engine(self) -> AnyEngine:
        """The loaded engine. Only its immutable parts may be read from other threads."""
        assert self._engine is not None, "the engine is not loaded yet"
        return self._engine

    @property
    def input_processor(self) -> InputProcessor | PoolingInputProcessor:
        """The engine's tokenising and validating half; safe on any thread."""
        return self.engine.input_processor

    @property
    def capacity(self) -> Capacity | None:
        """The engine's headroom after its last step; None until the model is loaded."""
        return self._capacity

    @property
    def stats(self) -> EngineStats | None:
        """The latest snapshot, at most `STATS_INTERVAL_S` old while the engine steps; None while it loads."""
        return self._stats

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state is not EngineState.FAILED

    def lost_rank(self) -> str | None:
        """The process that died, of a model spread over several; None if all are alive."""
        return self._engine.failure() if self._engine is not None and self.is_alive else None

    def stalled_for(self) -> float:
        """Seconds since the loop last made progress; 0 while loading, idle or held, infinite once dead."""
        if self.state is EngineState.FAILED:
            return float("inf")
        return time.monotonic() - self._last_progress if self.state is EngineState.RUNNING else 0.0

    def _run(self) -> None:
        try:
            self._load()
            while self._take_commands():
                self._step()
            self.state = EngineState.STOPPED
        except EngineError as error:
            self._fail(error)
        except BaseException as error:
            logger.exception("the engine thread died")
            self._fail(error)
        finally:
            if self._engine is not None:
                self._engine.close()

    def _load(self) -> None:
        # Imports torch, so only the thread that owns the engine pays for it.
        from pagemill.engine.serving import load_engine

        self._engine = load_engine(self._config)
        if self._engine.tokenizer is None and not self._config.skip_tokenizer_init:
            raise ModelLoadError(
                f"{self._config.model} has no tokenizer, so each job with a text would fail: download its files "
                "too, or serve token ids (skip_tokenizer_init)"
            )
        self._engine.load_grammar_vocabulary()  # in a separate process, finished before the first job
        self._publish(self._engine, force=True)
        self.state = EngineState.IDLE
        self._loaded.set()

    def _fail(self, error: BaseException) -> None:
        self.error = error
        self.state = EngineState.FAILED
        self._loaded.set()
        self._deliver([])

    def _take_commands(self) -> bool:
        """Drain the inbox, waiting for a command if there is nothing to step. Return False to stop."""
        engine = self.engine
        while True:
            busy = engine.has_unfinished() and not self._held
            if not busy:
                self._publish(engine, force=True)
                self.state = EngineState.HELD if engine.has_unfinished() else EngineState.IDLE
            try:
                command = self._inbox.get(block=not busy)
            except Empty:
                return True
            self._last_progress = time.monotonic()
            self.state = EngineState.RUNNING
            if isinstance(command, Stop):
                return False
            self._execute(engine, command)

    def _execute(self, engine: AnyEngine, command: Command) -> None:
        match command:
            case AddRequest():
                self._device_time.begin(command.request_id)
                try:
                    engine.add_request(
                        command.request_id,
                        command.prompt_token_ids,
                        command.params,
                        priority=command.priority,
                        arrival=command.arrival,
                        resume=command.resume,
                        cache_salt=command.cache_salt,
                        task=command.task,
                        adapter=command.adapter,
                    )
                except InvalidRequest as error:
                    self._send([_refusal(command, error)])
            case AbortRequest(request_id):
                if outputs := engine.abort(request_id):
                    self._send(outputs)
            case SetHeld(held):
                self._held = held
            case WatchBlocks(seconds):
                engine.watch_blocks(seconds)

    def _step(self) -> None:
        engine = self.engine
        began = time.perf_counter()
        outputs = engine.step()
        self._device_time.add(time.perf_counter() - began)
        self._last_progress = time.monotonic()
        self._publish(engine)
        if outputs:
            self._send(outputs)

    def _send(self, outputs: list[RequestOutput]) -> None:
        for output in outputs:
            if output.finished:
                output.device_s = self._device_time.end(output.request_id)
        self._deliver(outputs)

    def _publish(self, engine: AnyEngine, *, force: bool = False) -> None:
        now = time.monotonic()
        self._capacity = engine.capacity()
        if force or now - self._stats_at >= STATS_INTERVAL_S:
            self._stats = engine.stats()
            self._stats_at = now


def _refusal(request: AddRequest, error: InvalidRequest) -> RequestOutput:
    return RequestOutput(
        request_id=request.request_id,
        phase="waiting",
        prompt_tokens_done=0,
        prompt_tokens=len(request.prompt_token_ids),
        finished=True,
        error=str(error),
        error_code=error.code,
    )
