"""The audit of one worker: runs canaries when the engine is idle, votes on them, and quarantines the worker.

It has its own thread and connection. A canary is an ordinary request, so it only takes its share of a step:
after all jobs, or with the priority of normal ones if it is overdue.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import time
from collections.abc import Callable, Sequence

from pagemill.common.backoff import Backoff
from pagemill.engine.outputs import EngineStats, RequestOutput
from pagemill.engine.text.input_processor import InputProcessor
from pagemill.producer.wire.calls import audit
from pagemill.producer.wire.calls.audit import AuditView
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.worker.audit.canary import IDLE_PRIORITY, Canary, answer_of, canaries, matching
from pagemill.worker.background import BackgroundThread
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.intake import PRIORITIES

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

LOOK_S = 2.0
"""Maximum seconds until a worker learns that it was outvoted, or that its answer is needed."""
FIRST_S = 60.0
"""Maximum seconds until the first canary."""
PATIENCE_S = 120.0
"""Maximum duration of canaries in seconds, including the wait for other jobs."""


class Auditor(BackgroundThread):
    def __init__(
        self,
        context: WorkerContext,
        queue: JobQueue,
        engine: EngineHost,
        *,
        version: str,
        is_idle: Callable[[], bool],
        changed: Callable[[], None],
    ) -> None:
        """`version`: of the software; workers with the same one are compared. `changed` is called after
        `reason` has changed, and again while there are jobs to requeue."""
        super().__init__("pagemill-audit")
        self._queue = queue
        self._engine = engine
        self._counters = context.counters
        self._table = context.table
        self._interval_s = context.config.audit_interval_s
        self._input_bytes = context.config.audit_input_mib << 20
        self._is_local = context.config.engine_url is None
        self._version = version
        self._is_idle = is_idle
        self._changed = changed
        self._asked: dict[str, Canary] = {}
        self._answered = threading.Event()
        self._number = 0
        self._trouble = 0
        self._due = 0.0
        self.reason: str | None = None
        """Why the worker is quarantined; None if it is not."""

    def start(self) -> None:
        """Start, unless canaries are off or the engine does not generate from token ids."""
        is_model = self._is_local and isinstance(self._engine.input_processor, InputProcessor)
        if self._interval_s and is_model:
            self._due = time.monotonic() + min(self._interval_s, FIRST_S)
            super().start()

    def take(self, outputs: Sequence[RequestOutput]) -> None:
        """Receive outputs of canaries; called on the engine's thread."""
        for output in outputs if self._asked else ():
            asked = self._asked.get(output.request_id)
            if asked is not None:
                asked.apply(output)
                if output.finished:
                    self._answered.set()

    def audit(self, priority: int = IDLE_PRIORITY) -> None:
        """Run the canaries and vote. Raises RedisUnavailable."""
        before = self._view()
        self._trouble = _trouble_of(self._engine.stats)
        asked = self._run_canaries(priority)
        if self._stop.is_set():
            return
        error = next((one.error for one in asked if one.error is not None or not one.is_over), None)
        if error is not None or not all(one.is_over for one in asked):
            self._counters.canaries.inc("failed")
            logger.warning("a canary failed: %s", error or f"it took more than {PATIENCE_S:.0f} s")
            return
        tier = self._engine.engine.tier
        answer = answer_of(asked, tier)
        while True:
            seen = self._view(with_answers=True).answers
            given = matching(answer, seen, tier)
            call = audit.vote(
                self._queue.queue, self._queue.worker_id, self._what(), given, len(seen), before.position
            )
            verdict, reason = self._queue.run(call)
            if verdict != "changed":
                break
        self._counters.canaries.inc(verdict)
        if verdict == "disputed":
            logger.warning("a canary is disputed: %s", reason)
        if verdict == "deviates":
            self._quarantine(reason)

    def _run(self) -> None:
        backoff = Backoff()
        while not self._stop.is_set():
            try:
                self._tick()
                backoff.reset()
                self._stop.wait(min(LOOK_S, self._interval_s))
            except RedisUnavailable:
                self._stop.wait(backoff.next())
            except Exception:
                logger.exception("the audit failed; trying again")
                self._stop.wait(max(LOOK_S, backoff.next()))

    def _tick(self) -> None:
        view = self._view()
        while view.has_more and not self._stop.is_set():
            view = self._view()
        if view.state == "quarantined":
            self._quarantine(view.reason)
        elif view.state == "kept" and self.reason is not None:
            logger.warning("an operator ended the quarantine")
            self.reason = None
            self._changed()
        if self.reason is not None:
            return
        now = time.monotonic()
        is_late = now >= self._due + self._interval_s / 2
        is_urgent = view.is_wanted or is_late or _trouble_of(self._engine.stats) > self._trouble
        if is_urgent or (now >= self._due and self._is_idle()):
            self._due = time.monotonic() + self._interval_s
            self.audit(PRIORITIES["normal"] if is_urgent else IDLE_PRIORITY)

    def _quarantine(self, reason: str) -> None:
        if self.reason is None:
            logger.critical(
                "quarantined: %s; running jobs are requeued, and none is pulled until a restart or "
                "`pagemill recall keep`",
                reason,
            )
            self.reason = reason
            self._changed()
        elif len(self._table):
            self._changed()  # pulled meanwhile

    def _run_canaries(self, priority: int) -> list[Canary]:
        self._number += 1
        asked = canaries(self._number, self._engine.input_processor.vocab_size, priority)
        until = time.monotonic() + PATIENCE_S
        for one in asked:
            self._answered.clear()
            self._asked = {one.request.request_id: one}
            self._engine.add(one.request)
            while not one.is_over and time.monotonic() < until and not self._stop.is_set():
                self._answered.wait(0.2)
            if not one.is_over:
                self._engine.abort(one.request.request_id)
                break
        self._asked = {}
        return asked

    def _view(self, *, with_answers: bool = False) -> AuditView:
        call = audit.view(
            self._queue.queue,
            self._queue.worker_id,
            self._what(),
            self._input_bytes,
            with_answers=with_answers,
        )
        return self._queue.run(call)

    def _what(self) -> str:
        """Return a key for the function that the worker computes, with this version of the software."""
        named = f"{self._engine.engine.fingerprint} {self._version} {self._engine.engine.tier}"
        return hashlib.sha256(named.encode()).hexdigest()[:24]


def _trouble_of(stats: EngineStats | None) -> int:
    """Return how often the device failed: steps that raised, and rows with non-finite logits."""
    return 0 if stats is None else stats.scheduler.steps_failed + stats.scheduler.invalid_logits
