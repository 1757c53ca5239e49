"""A pool for Celery's own worker that keeps hundreds of tasks in one continuous batch.

A generation goes through the native queue under the task's id, and the tracer runs once its outcome is known.
So a task that is delivered twice is generated once, and a generation outlives its Celery worker. Other tasks
run on threads. Celery is not patched; celery/concurrency/base.py is the interface.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from celery.concurrency.base import BasePool, apply_target
from celery.exceptions import SoftTimeLimitExceeded
from kombu.serialization import loads, prepare_accept_content

from pagemill.producer import AsyncProducer
from pagemill.producer.celery.run_clock import clock
from pagemill.producer.celery.task import TASK_NAME, desk, job_fields, plain_error, plain_result
from pagemill.producer.wire.schema.errors import PagemillError, QueueFull, RedisUnavailable

logger = logging.getLogger(__name__)

PROGRESS_S = 1.0
RETRY_S = 0.5
STOP_S = 30.0
FIRST_PID = 2**22
"""Above any real process id, so that a stray kill has no target."""


@dataclass(frozen=True, slots=True)
class PoolSettings:
    """The settings that `pagemill celery-worker` passes to the pool, which Celery itself creates."""

    url: str
    queue: str
    model: str | None = None
    threads: int = 4


@dataclass(slots=True, eq=False)
class Generation:
    """One task under way."""

    task_id: str
    job_id: str
    pid: int
    run_tracer: Callable[[], None]
    on_timeout: Callable[[bool, float], None] | None
    soft_timeout: float | None
    timeout: float | None
    wants_progress: bool
    started_at: float = field(default_factory=time.monotonic)
    lock: threading.Lock = field(default_factory=threading.Lock)
    is_over: bool = False
    """Set before the tracer writes the end; no PROGRESS may be written after it."""
    is_submitted: bool = False
    generated_tokens: int = 0


class EnginePool(BasePool):  # type: ignore[misc]
    """Celery's pool interface over an AsyncProducer on its own thread."""

    settings: PoolSettings
    """Set on the class before Celery creates the pool."""
    current: EnginePool | None = None

    body_can_be_buffer = True
    signal_safe = False
    task_join_will_block = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._pids = itertools.count(FIRST_PID)
        self._running: dict[int, Generation] = {}
        self._lock = threading.Lock()
        self._loop = asyncio.new_event_loop()
        self._threads = ThreadPoolExecutor(self.settings.threads, thread_name_prefix="task")
        self._tracers = ThreadPoolExecutor(4, thread_name_prefix="tracer")
        self._loop_thread = threading.Thread(target=self._loop.run_forever, name="generations", daemon=True)
        self._producer: AsyncProducer | None = None
        type(self).current = self

    def on_start(self) -> None:
        self._does_debug = False  # it logs a task's message, with its prompt
        self._loop_thread.start()
        self._producer = AsyncProducer(self.settings.url, queue=self.settings.queue)
        self._spawn(self._report_progress())

    def on_stop(self) -> None:
        """Celery's warm shutdown: wait for tasks under way."""
        while self.num_running and self._loop_thread.is_alive():
            time.sleep(0.05)
        self._threads.shutdown(wait=True)
        self._close()

    def on_terminate(self) -> None:
        """Celery's cold shutdown: jobs stay in the native queue; redelivered messages find them there."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._close()

    def on_apply(
        self,
        target: Callable[..., Any],
        args: Any = None,
        kwargs: Any = None,
        callback: Callable[..., Any] | None = None,
        accept_callback: Callable[..., Any] | None = None,
        timeout_callback: Callable[[bool, float], None] | None = None,
        soft_timeout: float | None = None,
        timeout: float | None = None,
        **_: Any,
    ) -> None:
        pid = next(self._pids)
        if args[0] != TASK_NAME:
            accept = accept_callback and (lambda _pid, started: accept_callback(pid, started))
            self._threads.submit(apply_target, target, args, kwargs, callback, accept)
            return
        _, task_id, request, body, content_type, content_encoding = args
        if accept_callback is not None:
            accept_callback(pid, time.monotonic())
        retries = int(request.get("retries") or 0)
        generation = Generation(
            task_id=task_id,
            job_id=task_id if not retries else f"{task_id}.{retries}",
            pid=pid,
            run_tracer=lambda: apply_target(target, args, kwargs, callback, None),
            on_timeout=timeout_callback,
            soft_timeout=soft_timeout,
            timeout=timeout,
            wants_progress=not request.get("ignore_result"),
        )
        with self._lock:
            self._running[pid] = generation
        self._spawn(self._generate(generation, self._arguments(body, content_type, content_encoding)))

    def terminate_job(self, pid: int, signal: Any = None) -> None:
        """Cancel the job for `revoke(terminate=True)`. Runs no tracer: Celery announces the end itself."""
        with self._lock:
            generation = self._running.pop(pid, None)
        if generation is not None:
            with generation.lock:
                generation.is_over = True
            self._spawn(self._cancel(generation))

    @property
    def num_running(self) -> int:
        with self._lock:
            return len(self._running)

    def _get_info(self) -> dict[str, Any]:
        info: dict[str, Any] = super()._get_info()
        return info | {
            "running": self.num_running,
            "threads": self.settings.threads,
            "queue": self.settings.queue,
        }

    def _arguments(self, body: Any, content_type: str | None, encoding: str | None) -> tuple[Any, Any]:
        """Return the task's args and kwargs, decoded as by the tracer: pickle only if the app accepts it."""
        if content_type:
            accept = prepare_accept_content(self.app.conf.accept_content)
            args, kwargs, _ = loads(body, content_type, encoding, accept=accept)
        else:
            args, kwargs, _ = body
        return args, kwargs

    async def _generate(self, generation: Generation, arguments: tuple[Any, Any]) -> None:
        outcome: dict[str, Any] | BaseException | None
        try:
            fields = job_fields(*arguments, self.settings.model)
            outcome = await self._outcome(generation, fields)
        except PagemillError as error:
            outcome = plain_error(error)
        except Exception as error:
            logger.exception("task %s could not be run", generation.task_id)
            outcome = plain_error(error)
        with self._lock:
            is_ours = self._running.get(generation.pid) is generation
        if is_ours:
            await self._loop.run_in_executor(self._tracers, self._finish, generation, outcome)

    async def _outcome(
        self, generation: Generation, fields: dict[str, Any]
    ) -> dict[str, Any] | BaseException | None:
        """Return the result, SoftTimeLimitExceeded, or None when the hard limit has ended the task."""
        limits = [limit for limit in (generation.soft_timeout, generation.timeout) if limit]
        try:
            async with asyncio.timeout(min(limits) if limits else None):
                return await self._result(generation, fields)
        except TimeoutError:
            await self._cancel(generation)
            is_soft = generation.soft_timeout is not None and generation.soft_timeout == min(limits)
            if generation.on_timeout is not None:
                await self._loop.run_in_executor(self._tracers, generation.on_timeout, is_soft, min(limits))
            return SoftTimeLimitExceeded() if is_soft else None

    async def _result(self, generation: Generation, fields: dict[str, Any]) -> dict[str, Any]:
        assert self._producer is not None
        while True:
            try:
                handle = await self._producer.submit(fields, job_id=generation.job_id)
                generation.is_submitted = True
                return plain_result(await handle.result())
            except (RedisUnavailable, QueueFull):
                await asyncio.sleep(RETRY_S)  # the id makes the submit idempotent

    async def _cancel(self, generation: Generation) -> None:
        assert self._producer is not None
        try:
            await self._producer.job(generation.job_id).cancel()
        except PagemillError as error:
            logger.warning("task %s could not be cancelled: %s", generation.task_id, error)

    def _finish(self, generation: Generation, outcome: dict[str, Any] | BaseException | None) -> None:
        """Run the tracer, on its thread. None: not needed, Celery knows of the hard limit already."""
        with generation.lock:
            generation.is_over = True
        try:
            if outcome is not None:
                desk.leave(generation.task_id, outcome)
                with clock.since(generation.started_at):
                    generation.run_tracer()
        except Exception:
            logger.exception("the tracer failed on task %s", generation.task_id)
        finally:
            with self._lock:
                self._running.pop(generation.pid, None)

    async def _report_progress(self) -> None:
        """Write PROGRESS for tasks with new tokens, with one status call for all."""
        while True:
            await asyncio.sleep(PROGRESS_S)
            with self._lock:
                running = [g for g in self._running.values() if g.wants_progress and g.is_submitted]
            assert self._producer is not None
            try:
                statuses = await self._producer.statuses([generation.job_id for generation in running])
            except PagemillError:
                continue  # a job or the server is gone: retried at the next interval
            for generation, status in zip(running, statuses, strict=True):
                if status.progress.generated_tokens > generation.generated_tokens:
                    generation.generated_tokens = status.progress.generated_tokens
                    meta = status.progress.model_dump(mode="json")
                    await self._loop.run_in_executor(self._tracers, self._store_progress, generation, meta)

    def _store_progress(self, generation: Generation, meta: dict[str, Any]) -> None:
        with generation.lock:
            if not generation.is_over:
                try:
                    self.app.backend.store_result(generation.task_id, meta, "PROGRESS")
                except Exception as error:  # any error of the backend: progress is optional
                    logger.warning("no progress for task %s: %s", generation.task_id, error)

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> Future[None]:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop)

    def _close(self) -> None:
        if self._loop_thread.is_alive():
            if self._producer is not None:
                self._spawn(self._producer.close()).result(timeout=STOP_S)
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._loop_thread.join(timeout=STOP_S)
        self._tracers.shutdown(wait=False)
