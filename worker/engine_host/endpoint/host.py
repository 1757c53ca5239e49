"""An engine host for an endpoint that another program serves, next to those for a thread and a process.

One thread with an event loop. Each request has a task and a connection for its stream. Another task monitors the
endpoint: while it does not answer, no jobs are pulled; if it returns with another model, the device is lost.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from typing import Any

from pagemill.common.backoff import Backoff
from pagemill.engine.config import EngineConfig
from pagemill.engine.errors import DeviceLost, EngineError
from pagemill.engine.outputs import (
    Capacity,
    EngineStats,
    LoadedModel,
    RequestOutput,
    RequestStats,
    SchedulerStats,
)
from pagemill.worker.endpoint_settings import EndpointSettings
from pagemill.worker.engine_host.endpoint.connection import (
    BadAnswer,
    Connection,
    Interrupted,
    Refused,
    Unavailable,
)
from pagemill.worker.engine_host.endpoint.dialect import LLAMA_CPP
from pagemill.worker.engine_host.endpoint.load import Load, read_metrics, read_slots
from pagemill.worker.engine_host.endpoint.relay import Relay
from pagemill.worker.engine_host.endpoint.served import EndpointModel, identify, probe
from pagemill.worker.engine_host.host import Deliver, EngineHost
from pagemill.worker.engine_host.loop import STATS_INTERVAL_S
from pagemill.worker.engine_host.messages import (
    AbortRequest,
    AddRequest,
    Command,
    EngineState,
    Report,
    SetHeld,
)

logger = logging.getLogger(__name__)

POLL_S = 0.5
"""Seconds between checks of the endpoint's load and identity."""
LOOK_S = 5.0
"""Maximum seconds of one check; after it, pulls pause."""
MAX_WAIT_S = 5.0
"""Maximum pause between two attempts to reach it."""
FULL = 0.97
"""Maximum use of a KV cache of unknown size for pulling jobs."""
_NO_LIMIT = 2**32
"""The token capacity if the endpoint does not report it."""


class EndpointHost(EngineHost):
    """Requests run in the endpoint; this thread only relays."""

    def __init__(self, config: EngineConfig, settings: EndpointSettings, deliver: Deliver) -> None:
        super().__init__(deliver)
        self._config = config
        self._settings = settings
        self._thread = threading.Thread(target=self._run, name="pagemill-engine", daemon=True)
        self._loop = asyncio.new_event_loop()
        self._stopping = asyncio.Event()
        self._looking = asyncio.Event()
        self._model: EndpointModel | None = None
        self._requests: dict[str, tuple[AddRequest, asyncio.Task[None]]] = {}
        self._aborted: set[str] = set()
        self._figures = RequestStats()
        self._stats_at = 0.0
        self._load = Load()
        self._others: deque[int] = deque(maxlen=2)
        """Running and waiting sequences of other clients, at the last checks."""
        self._num_taken = 0
        self._is_held = False
        self._paused_until = 0.0
        self._is_reachable = False
        self._answers_as: str | None = None
        self._lost: DeviceLost | None = None

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        if self._thread.ident is None:
            self._loop.close()
            return True
        self._call(self._stopping.set)
        self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def engine(self) -> EndpointModel:
        assert self._model is not None, "the endpoint has not answered yet"
        return self._model

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive() and self.state is not EngineState.FAILED

    def lost_rank(self) -> str | None:
        return None

    def stalled_for(self) -> float:
        """As for an engine, minus the time that a check of the endpoint may take: requests have their own limit."""
        return max(0.0, super().stalled_for() - LOOK_S - POLL_S)

    def _send(self, command: Command) -> None:
        self._call(self._execute, command)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with suppress(RuntimeError):  # the loop is closed because the worker exits
            self._loop.call_soon_threadsafe(function, *args)

    def _run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
                runner.run(self._serve())
            self.state = EngineState.STOPPED
        except EngineError as error:
            self._fail(error)
        except BaseException as error:
            logger.exception("the thread of the endpoint died")
            self._fail(error)

    async def _serve(self) -> None:
        async with Connection(self._settings.url, self._settings.key) as self._connection:
            watching = asyncio.ensure_future(self._watch())
            stopping = asyncio.ensure_future(self._stopping.wait())
            try:
                await asyncio.wait({watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
                if watching.done():
                    watching.result()
            finally:
                tasks = [task for _, task in self._requests.values()]
                for task in (watching, stopping, *tasks):
                    task.cancel()
                await asyncio.gather(watching, stopping, *tasks, return_exceptions=True)

    async def _watch(self) -> None:
        """Find the endpoint, then report its load until it serves something else. Raises `EngineError`."""
        backoff = Backoff(0.1, MAX_WAIT_S)
        while True:
            self._looking.clear()
            try:
                async with asyncio.timeout(None if self._model is None else LOOK_S):
                    await self._refresh()
                if not self._is_reachable:
                    logger.info("the endpoint answers")
                self._is_reachable = True
                backoff.reset()
                pause = POLL_S
            except (Unavailable, BadAnswer, TimeoutError) as error:
                if self._is_reachable or backoff.failures == 0:
                    logger.warning("waiting for the endpoint: %s", _message(error))
                self._is_reachable = False
                pause = backoff.next()
            if self._model is not None:
                self._publish()
            with suppress(TimeoutError):
                await asyncio.wait_for(self._looking.wait(), pause)

    async def _refresh(self) -> None:
        if self._lost is not None:
            raise self._lost
        identity = await identify(self._connection, self._config.served_model_name)
        if self._model is None:
            self._model = await probe(self._connection, identity, self._config, self._settings.revision)
        elif identity != self._model.identity:
            raise DeviceLost(
                "the endpoint serves another model, or another version of the engine, than before"
            )
        ours = self._num_sequences()
        self._load = load = await self._read_load()
        ours = min(ours, self._num_sequences())  # newer requests might not be in the endpoint's metrics
        self._others.append(max(0, (load.running or 0) + (load.waiting or 0) - ours))

    async def _read_load(self) -> Load:
        is_slotted = self.engine.identity.dialect is LLAMA_CPP
        try:
            found = await self._connection.get("/slots" if is_slotted else "/metrics", at_root=True)
        except (BadAnswer, Refused):
            return Load()
        except Unavailable as error:
            if error.status is None:
                raise
            return Load()
        return read_slots(found) if is_slotted else read_metrics(found.decode("utf-8", "replace"))

    def _publish(self, outputs: list[RequestOutput] | None = None) -> None:
        """Report the current state, as an engine does after a step."""
        if not self._is_reachable:
            state = EngineState.LOADING  # no job is pulled
        elif self._is_held:
            state = EngineState.HELD
        else:
            state = EngineState.RUNNING if self._requests else EngineState.IDLE
        now = time.monotonic()
        stats = None
        if outputs is None or now >= self._stats_at + STATS_INTERVAL_S:
            stats, self._stats_at = self._snapshot(), now
        self._take(Report(state, now, self._num_taken, self._headroom(), stats, outputs or []))

    def _num_sequences(self) -> int:
        return sum(request.params.n for request, _ in self._requests.values())

    def _rows(self) -> int:
        """Return the sequences that may run here. Those of other clients, and a backlog, reduce their number."""
        load, rows = self._load, self.engine.limits.max_num_seqs
        is_full = bool(load.waiting) or (load.kv_blocks is None and (load.kv_use or 0.0) > FULL)
        if is_full or time.monotonic() < self._paused_until:
            return 0
        return max(0, min(rows, load.rows or rows) - max(self._others, default=0))

    def _headroom(self) -> Capacity:
        load = self._load
        blocks = _NO_LIMIT // load.block_size
        if load.kv_blocks is not None and load.kv_use is not None:
            blocks = int(load.kv_blocks * max(0.0, 1.0 - load.kv_use))
        rows = self._rows()
        free = max(0, rows - self._num_sequences())
        return Capacity(free, blocks, load.block_size, load.waiting or 0, rows=rows)

    def _snapshot(self) -> EngineStats:
        load, model = self._load, self.engine
        kv, known = load.kv_stats()
        running = self._num_sequences() if load.running is None else load.running
        loaded = LoadedModel(
            model.identity.model,
            "endpoint",
            model.tier,
            model.fingerprint,
            model.limits.max_model_len,
            model.limits.max_num_seqs,
        )
        scheduler = SchedulerStats(running=running, waiting=load.waiting or 0)
        return EngineStats(kv, scheduler, loaded, requests=deepcopy(self._figures), known=known)

    def _execute(self, command: Command) -> None:
        self._num_taken += 1
        match command:
            case AddRequest():
                self._add(command)
            case AbortRequest(name) if name in self._requests:
                self._aborted.add(name)
                self._requests[name][1].cancel()
            case SetHeld(held):
                self._is_held = held
                self._publish()

    def _add(self, request: AddRequest) -> None:
        """Start a request. Its end is reported even if it is aborted before its first step."""
        relay = Relay(request, self.engine, lambda output: self._publish([output]), self._check_model)
        task = self._loop.create_task(relay.run(self._connection, self._settings.stall_s))
        self._requests[request.request_id] = request, task
        task.add_done_callback(lambda ended: self._finish(request, relay, ended))
        self._publish()

    def _finish(self, request: AddRequest, relay: Relay, task: asyncio.Task[None]) -> None:
        """Report the end of a request and the outcome of its job."""
        name = request.request_id
        failure = None if task.cancelled() else task.exception()
        last, reason = relay.last_output(), relay.reason
        match failure:
            case None if task.cancelled():
                reason, last.let_go = "abort", None if name in self._aborted else "released"
            case None:
                pass
            case Unavailable() | DeviceLost():
                last.let_go = "released"
            case Interrupted() | TimeoutError():
                last.let_go = "lapsed"
            case Refused():
                last.error, last.error_code = _message(failure), _REFUSALS.get(failure.reason, "invalid_job")
            case _:
                last.error, last.error_code = _message(failure), "engine_error"
        if failure is not None:
            reason = "error"
            self._note(request, failure)
        del self._requests[name]
        self._aborted.discard(name)
        self._figures.finished[reason] += 1
        self._figures.prompt_tokens += last.prompt_tokens_done
        self._figures.generated_tokens += last.usage.completion_tokens if last.usage is not None else 0
        self._publish([last])

    def _note(self, request: AddRequest, failure: BaseException) -> None:
        """Log a failure and check the endpoint before the next pull: it may be down, or serve another model."""
        logger.warning("request %s did not end: %s", request.request_id, _message(failure))
        if isinstance(failure, Unavailable):
            self._paused_until = time.monotonic() + failure.retry_after_s
        if not isinstance(failure, Refused):
            self._is_reachable = False
            self._looking.set()

    def _check_model(self, event: dict[str, Any]) -> None:
        """Raise `DeviceLost` if an event is from another model than the events before it."""
        name = event.get("model")
        if not isinstance(name, str):
            return
        if self._answers_as is None:
            self._answers_as = name
        elif name != self._answers_as:
            self._lost = DeviceLost("the endpoint answers with another model than before")
            raise self._lost


_REFUSALS = {"context_length_exceeded": "prompt_too_long", "prompt_too_long": "prompt_too_long"}


def _message(failure: BaseException) -> str:
    """Return a failure's message without text that it may quote."""
    if isinstance(failure, EngineError):
        return str(failure)
    if isinstance(failure, TimeoutError):
        return "the engine sent nothing for too long"
    return f"relaying it raised {type(failure).__name__}"
