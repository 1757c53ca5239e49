"""The loop around an engine: takes commands between two steps, and reports after each. It is the same on a
thread of the worker and in a separate process.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING

from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import RequestOutput
from pagemill.worker.device_time import DeviceTime
from pagemill.worker.engine_host.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineState,
    Report,
    SetHeld,
    Stop,
    WatchBlocks,
)
from pagemill.worker.interpreter import spin_briefly

if TYPE_CHECKING:
    from pagemill.engine.serving import AnyEngine

STATS_INTERVAL_S = 0.1


def load(config: EngineConfig) -> AnyEngine:
    """Load the model for a worker. Raises `EngineError`, mostly `ModelLoadError`."""
    spin_briefly()
    # This imports torch, so only the process with the engine does it.
    from pagemill.engine.serving import load_engine

    engine = load_engine(config)
    if engine.tokenizer is None and not config.skip_tokenizer_init:
        from pagemill.engine.runnable import lacks_tokenizer

        raise lacks_tokenizer(config)
    engine.load_grammar_vocabulary()  # in a separate process, finished before the first job
    return engine


class EngineLoop:
    """Owned by one thread; others fill the inbox. `report` must not block for long."""

    def __init__(
        self, engine: AnyEngine, inbox: SimpleQueue[Command], report: Callable[[Report], None]
    ) -> None:
        self._engine = engine
        self._inbox = inbox
        self._report = report
        self._held = False
        self._device_time = DeviceTime()
        self._num_taken = 0
        self._stats_at = 0.0

    def run(self) -> None:
        """Step until stopped. Raises the engine's errors."""
        while self._take_commands():
            self._step()

    def _take_commands(self) -> bool:
        """Drain the inbox, waiting for a command if there is nothing to step. Return False to stop."""
        engine = self._engine
        while True:
            busy = engine.has_unfinished() and not self._held
            if not busy:
                state = EngineState.HELD if engine.has_unfinished() else EngineState.IDLE
                self._publish(state, with_stats=True)
            try:
                command = self._inbox.get(block=not busy)
            except Empty:
                return True
            self._num_taken += 1
            if isinstance(command, Stop):
                return False
            if not busy:
                self._report(Report(EngineState.RUNNING, time.monotonic(), self._num_taken))
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
                        media=command.media,
                    )
                except InvalidRequest as error:
                    self._publish(EngineState.RUNNING, [_refusal(command, error)])
            case AbortRequest(request_id):
                if outputs := engine.abort(request_id):
                    self._publish(EngineState.RUNNING, outputs)
            case SetHeld(held):
                self._held = held
            case WatchBlocks(seconds):
                engine.watch_blocks(seconds)

    def _step(self) -> None:
        began = time.perf_counter()
        outputs = self._engine.step()
        self._device_time.add(time.perf_counter() - began)
        self._publish(EngineState.RUNNING, outputs)

    def _publish(
        self, state: EngineState, outputs: Sequence[RequestOutput] = (), *, with_stats: bool = False
    ) -> None:
        for output in outputs:
            if output.finished:
                output.device_s = self._device_time.end(output.request_id)
        now = time.monotonic()
        stats = None
        if with_stats or now >= self._stats_at + STATS_INTERVAL_S:
            stats = self._engine.stats()
            self._stats_at = now
        self._report(Report(state, now, self._num_taken, self._engine.capacity(), stats, list(outputs)))


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
