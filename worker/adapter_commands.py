"""Carries out commands about adapters and pulling, on a separate thread: reading a folder may take seconds."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from pagemill.common.backoff import Backoff
from pagemill.engine.adapters.source import obtain_adapter
from pagemill.engine.errors import EngineError
from pagemill.producer.wire.calls import adapters
from pagemill.producer.wire.calls.adapters import AdapterAnswer, AdapterInfo, WorkerCommand
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import InvalidJob, RedisUnavailable
from pagemill.worker.background import BackgroundThread
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.pull_control import PullControl

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

POLL_S = 0.5
"""Maximum wait for a command, which also bounds the time to stop."""
_MAX_SKEW_S = 600.0
"""Maximum age of a signed command in seconds, so that a recorded one cannot be sent again."""


class WorkerCommands(BackgroundThread):
    """Executes adapter and pull commands. `changed` is called after the adapters, or whether it pulls, have changed."""

    def __init__(
        self,
        context: WorkerContext,
        queue: JobQueue,
        engine: EngineHost,
        pulling: PullControl,
        changed: Callable[[], None],
    ) -> None:
        super().__init__("pagemill-commands")
        self._queue = queue
        self._engine = engine
        self._pulling = pulling
        self._clock = context.clock
        self._keys = context.hmac_keys
        self._changed = changed

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                stored = self._queue.next_command(POLL_S)
                if stored is not None:
                    self._obey(stored)
                backoff.reset()
            except RedisUnavailable:
                self._stop.wait(backoff.next())
            except Exception:
                logger.exception("a command failed", extra=IN_LOOP)
                self._stop.wait(backoff.next())

    def _obey(self, stored: bytes) -> None:
        worker_id = self._queue.worker_id
        try:
            body = self._keys.check_command(stored, queue=self._queue.queue, worker_id=worker_id)
            command = WorkerCommand.model_validate_json(body)
        except ValueError as error:  # InvalidJob and pydantic's: the sender is unknown
            reason = str(error) if isinstance(error, InvalidJob) else "it can't be read"
            logger.warning("a command is ignored: %s", reason)
            return
        answer = self._carry_out(command)
        self._queue.run(adapters.answer(self._queue.queue, command.id, worker_id, answer))

    def _carry_out(self, command: WorkerCommand) -> AdapterAnswer:
        error: str | None = None
        pool = self._engine.engine.adapters
        if self._keys and abs(self._clock.now() - command.sent_at) > _MAX_SKEW_S:
            return AdapterAnswer(
                error=f"the command's signature: its time is more than {_MAX_SKEW_S:.0f} s from the server's; "
                "synchronize the clocks of sender and Redis server (NTP)"
            )
        if command.action in ("drain", "pause", "resume"):
            self._pulling.decide(command.action)
            self._changed()
            logger.info("an operator's command: %s", command.action)
            return AdapterAnswer()
        started = time.monotonic()
        try:
            if command.action == "add":
                pool.add(command.name, obtain_adapter(command.source))
            elif command.action == "remove":
                pool.remove(command.name)
        except EngineError as refusal:
            error = str(refusal)
        except Exception as failure:  # a folder can make a library raise anything
            logger.exception("adapter %s can't be added", command.name)
            error = f"adapter {command.name} can't be read: {type(failure).__name__}"
        if command.action != "list":
            self._changed()
            logger.info(
                "adapter %s: %s after %.2f s",
                command.name,
                error or command.action,
                time.monotonic() - started,
            )
        named = [
            AdapterInfo(
                name=one.name,
                digest=one.digest,
                rank=one.rank,
                num_bytes=one.num_bytes,
                source=str(one.directory),
            )
            for one in pool.registered()
        ]
        return AdapterAnswer(error=error, adapters=tuple(named))
