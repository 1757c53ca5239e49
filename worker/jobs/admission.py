"""Admission: pulls as many jobs as the engine has room for, and turns them into requests.

A pulled job is invisible to other workers, so none is pulled only to wait here. Room is counted in rows and
in KV tokens: the free or evictable blocks, less the expected growth of running requests.
"""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.engine.errors import InvalidRequest
from pagemill.engine.outputs import Capacity, SampleState
from pagemill.monitoring.counters import BlockReason
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import InvalidJob, QueueFull, RedisUnavailable
from pagemill.producer.wire.schema.outputs import ErrorInfo, Progress
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.engine_host.messages import AddRequest, EngineState
from pagemill.worker.job_queue import Backoff, JobQueue
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.final_write import failed, handed_back, unfetched
from pagemill.worker.jobs.intake import Intake
from pagemill.worker.jobs.leases import LeaseKeeper
from pagemill.worker.jobs.reporter import ProgressReporter
from pagemill.worker.jobs.running_job import PRIORITIES, RunningJob, sample_states
from pagemill.worker.jobs.store.inputs import NUM_THREADS, StoredInputs

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

DOORBELL_S = 0.5
"""The longest sleep of an idle worker before it looks for jobs and sweeps anyway."""
BLOCKED_POLL_S = 0.25
FETCHING_S = 0.05
"""The same while payloads are being fetched."""
LONG_STEP_S = 2.0
"""While a step takes longer than this, jobs are left to other workers."""
MAX_JOBS_PER_PULL = 64
MAX_FETCHING = 2 * NUM_THREADS
"""Payloads on their way from the store."""
JOBS_PER_START = 16
"""Jobs announced and started at a time: the engine begins while the rest are prepared."""
OUTPUT_RATIO_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Credit:
    """The room for jobs that may be pulled now. If for none, `blocked` says why."""

    jobs: int
    tokens: int
    block_size: int = 1
    blocked: BlockReason | None = None
    urgent_only: bool = False
    """It is room that jobs of high priority may take from running ones of low priority."""


class OutputForecast:
    """The fraction of max_tokens a job is expected to use: a moving average, 1.0 until there is data."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def observe(self, job: RunningJob) -> None:
        used = job.generated_tokens / (job.max_tokens * job.params.n)
        self._ratio += OUTPUT_RATIO_WEIGHT * (used - self._ratio)

    def remaining(self, job: RunningJob) -> int:
        """Return the output tokens a job is still expected to add, over all its samples; at least one each."""
        expected = int(job.max_tokens * self._ratio) * job.params.num_sequences
        return max(job.params.num_sequences, expected - job.generated_tokens)


def credit(engine: EngineHost, running: list[RunningJob], forecast: OutputForecast) -> Credit:
    """Compute the engine's room for more jobs.

    Rows are the engine's, less those its requests will hold after its next step: a job pulled during a step
    is ready when the next one is planned, and those rows would be idle otherwise. Tokens are the blocks
    counted after the last step, less the growth still to come: a request not yet counted will grow by its
    full size.
    """
    capacity, stats = engine.capacity, engine.stats
    if capacity is None or stats is None or engine.state is EngineState.LOADING:
        return Credit(0, 0, blocked="loading")
    if engine.state is EngineState.HELD:
        return Credit(0, 0, blocked="results")
    if engine.stalled_for() > LONG_STEP_S:
        return Credit(0, 0, blocked="engine")
    live = [job for job in running if not job.has_left_engine]
    waits = stats.adapters.waiting > 0
    rows = stats.loaded.max_num_seqs - sum(
        job.params.num_sequences
        for job in live
        if not (job.is_about_to_end or (waits and job.waits_for_adapter))
    )
    tokens = _free_tokens(capacity, live, forecast)
    if rows <= 0:
        return _urgent_credit(
            live, rows, stats.loaded.max_num_seqs, Credit(0, max(0, tokens), capacity.block_size)
        )
    if tokens <= 0 and live:
        return Credit(0, 0, blocked="kv")
    return Credit(min(rows, MAX_JOBS_PER_PULL), max(0, tokens), capacity.block_size)


def _free_tokens(capacity: Capacity, live: list[RunningJob], forecast: OutputForecast) -> int:
    """Return the tokens of further jobs that the available blocks hold once running jobs have grown.

    Where layers have windows, a token takes fewer blocks the longer its job is: further jobs are taken to be
    as long as the running ones, and to need a block in every group of layers if there are none.
    """
    growth = [len(job.prompt_token_ids) - job.prompt_tokens_done + forecast.remaining(job) for job in live]
    if capacity.block_limits == (None,):
        return capacity.available_blocks * capacity.block_size - sum(growth)
    per_column = len(capacity.block_limits)
    left, lengths = capacity.available_blocks, list[int]()
    for job, tokens in zip(live, growth, strict=True):
        done = job.prompt_tokens_done + job.generated_tokens
        lengths.append(done + tokens)
        if job.params.num_sequences == 1:
            left -= capacity.blocks_for(done + tokens) - capacity.blocks_for(done)
        else:  # samples share some of their blocks
            left -= -(-tokens // capacity.block_size) * per_column
    blocks = sum(map(capacity.blocks_for, lengths))
    if not blocks:
        return left // per_column * capacity.block_size
    return left * sum(lengths) // blocks


def _urgent_credit(live: list[RunningJob], rows: int, max_num_seqs: int, free: Credit) -> Credit:
    """Compute the room for urgent jobs in an engine without rows: what is free, and what low jobs may give.

    `rows` is at most 0: below it, by what more than the engine's rows is asked for.
    """
    low = [job for job in live if job.job.priority == "low" and not job.is_about_to_end]
    rows += min(sum(job.params.num_sequences for job in low), max_num_seqs // 2)
    if rows <= 0:
        return Credit(0, 0, blocked="rows")
    tokens = free.tokens + sum(job.prompt_tokens_done + job.generated_tokens for job in low)
    return Credit(min(rows, MAX_JOBS_PER_PULL), tokens, free.block_size, urgent_only=True)


class Admission:
    """The pulling thread."""

    def __init__(
        self,
        context: WorkerContext,
        queue: JobQueue,
        engine: EngineHost,
        intake: Intake,
        reporter: ProgressReporter,
        leases: LeaseKeeper,
    ) -> None:
        self._queue = queue
        self._intake = intake
        self._journal = context.journal
        self._engine = engine
        self._table = context.table
        self._reporter = reporter
        self._leases = leases
        self._clock = context.clock
        self._counters = context.counters
        self._lanes: Callable[[], list[str]] = list
        self._room = threading.Event()
        self._stop = threading.Event()
        self._backoff = Backoff()
        self._thread = threading.Thread(target=self._run, name="pagemill-admission", daemon=True)
        self._forecast = OutputForecast()
        store = context.config.store()
        self._inputs = None if store is None else StoredInputs(store, context.config.store_timeout_s)
        self.blocked: BlockReason | None = "loading"
        """The reason this worker can't pull; None if it can."""
        self.refusal: str | None = None
        """Why the last pull failed, unless the server was away: a worker that can't pull is not ready."""

    def start(self, lanes: Callable[[], list[str]]) -> None:
        """`lanes`: the last parts of the lanes to pull from at the moment."""
        self._lanes = lanes
        self._thread.start()

    def stop(self) -> None:
        """Stop pulling. A pull in progress still hands its jobs to the engine."""
        self._stop.set()
        self._room.set()

    def join(self, timeout: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def on_finished(self, job: RunningJob | None) -> None:
        """Look for jobs again: `job` has left the engine, or is about to. Called on the reporter's thread."""
        if job is not None:
            self._forecast.observe(job)
        self._room.set()

    def _run(self) -> None:
        while not self._stop.is_set():
            try:
                self._pull_once()
                self._backoff.reset()
                self.refusal = None
            except RedisUnavailable:
                self._wait_for_redis()
            except QueueFull as error:  # out of memory: only results can be written, and they make room
                logger.warning("no jobs can be pulled: %s; trying again", error, extra=IN_LOOP)
                self._blocked_for("redis", DOORBELL_S)
            except Exception as error:
                logger.exception("pulling jobs failed; trying again")
                self.refusal = str(error)
                self._blocked_for("redis", self._backoff.next())
        self.blocked = "draining"
        for pulled in self._inputs.abandon() if self._inputs is not None else ():
            self._reporter.end(handed_back(self._queue.queue, pulled))

    def _pull_once(self) -> None:
        self._room.clear()
        self._take_in_fetched()
        room = credit(self._engine, self._table.running(), self._forecast)
        num_fetching = self._inputs.num_pending if self._inputs is not None else 0
        if room.blocked is not None:
            self._blocked_for(room.blocked, FETCHING_S if num_fetching else BLOCKED_POLL_S)
            return
        self._counters.credit_sequences = room.jobs
        self._counters.credit_blocks = room.tokens // room.block_size
        lanes = self._servable_lanes()
        may_fetch = self._inputs is not None and num_fetching < MAX_FETCHING
        # What is fetched has at most half of the room: a store that hangs stops nobody else's jobs.
        num_jobs = room.jobs - min(num_fetching, room.jobs // 2)
        reply = self._queue.pull(
            lanes,
            min(num_jobs, MAX_FETCHING - num_fetching) if may_fetch else num_jobs,
            room.tokens,
            holding=len(self._table),
            longest=self._engine.engine.limits.max_model_len,
            urgent_only=room.urgent_only,
            has_store=may_fetch,
        )
        for pulled in reply.jobs:
            self._table.hold(pulled.job_id, pulled.token)
        if reply.paused:
            self._blocked_for("paused", DOORBELL_S)
        elif reply.jobs:
            self.blocked = None
            for start in range(0, len(reply.jobs), JOBS_PER_START):
                self._take_in(reply.jobs[start : start + JOBS_PER_START])
        elif room.urgent_only:
            self._blocked_for("rows", BLOCKED_POLL_S)
        elif reply.queued and reply.limited_ms is not None:
            self._blocked_for("rate", min(DOORBELL_S, reply.limited_ms / 1000))
        elif reply.queued and len(self._table):
            # They need more room than there is, or wait for a suspect to end: the doorbell would wake us for
            # nothing.
            self._blocked_for("kv", BLOCKED_POLL_S)
        else:
            self.blocked = None
            due_s = DOORBELL_S if reply.next_due_ms is None else reply.next_due_ms / 1000
            longest_s = FETCHING_S if num_fetching else DOORBELL_S
            self._queue.wait_for_doorbell(reply.bells or lanes, min(longest_s, due_s))

    def _servable_lanes(self) -> list[str]:
        """Return the lanes to pull from: none of adapters while jobs here wait for one to be in memory."""
        lanes, stats = self._lanes(), self._engine.stats
        if stats is None or not stats.adapters.waiting:
            return lanes
        return [lane for lane in lanes if "#" not in lane]

    def _blocked_for(self, reason: BlockReason, timeout_s: float) -> None:
        if self.blocked != reason:
            logger.debug("no jobs are pulled: %s", reason)
        self.blocked = reason
        began = time.monotonic()
        self._room.wait(timeout_s)
        self._counters.admission_blocked_seconds.inc(reason, time.monotonic() - began)

    def _wait_for_redis(self) -> None:
        """Wait until the leases have been renewed: a pull sweeps, and would take away our own lapsed ones."""
        away_since = time.monotonic()
        self.blocked = "redis"
        while not self._stop.is_set() and not self._leases.wait_renewed(away_since, BLOCKED_POLL_S):
            self._counters.admission_blocked_seconds.inc("redis", BLOCKED_POLL_S)

    def _take_in(self, pulled: list[PulledJob]) -> None:
        """Validate, tokenise, announce and start jobs; an invalid one fails alone."""
        at_hand = pulled if self._inputs is None else [item for item in pulled if not self._is_fetched(item)]
        jobs = [job for item in at_hand if (job := self._prepare(item)) is not None]
        if not jobs:
            return
        # Before a job's first step: only a job that entered one can have crashed its worker.
        replies = self._announce([self._announcement(job) for job in jobs])
        for job, reply in zip(jobs, replies, strict=True):
            if reply == "stale":
                self._reporter.lost(job.job_id, job.token)
            else:
                self._start(job)
                if reply == "cancelled":
                    self._reporter.cancelled(job.job_id)

    def _is_fetched(self, pulled: PulledJob) -> bool:
        """Begin to fetch a job's payload if it is in the store; True unless it is at hand."""
        if self._inputs is None or pulled.fetched_for is not None:
            return False
        try:
            reference = self._intake.reference(pulled)
        except InvalidJob as error:
            self._fail(pulled, error.code, str(error))
            return True
        if reference is not None:
            self._inputs.fetch(pulled, reference)
        return reference is not None

    def _take_in_fetched(self) -> None:
        """Start jobs whose payloads have come from the store, and end those whose have not."""
        arrived = self._inputs.arrived() if self._inputs is not None else []
        for one in arrived:
            if one.error is None:
                self._take_in([one.pulled])
            elif one.error.retryable:
                self._counters.job_failures.inc("store_unavailable")
                problem = ErrorInfo(code="store_unavailable", message=str(one.error), retryable=True)
                self._reporter.end(unfetched(self._queue.queue, one.pulled, problem))
            else:
                self._fail(one.pulled, "payload_lost", str(one.error))

    def _prepare(self, pulled: PulledJob) -> RunningJob | None:
        self._counters.jobs_received.inc("redelivered" if pulled.crashes or pulled.entries else "first")
        self._counters.payload_bytes.observe(len(pulled.payload))
        started_at = self._clock.now()
        self._counters.queue_wait_seconds.observe(max(0.0, started_at - pulled.submitted_at))
        try:
            running = self._intake.running_job(pulled, started_at)
        except (InvalidJob, InvalidRequest) as error:
            self._fail(pulled, error.code, str(error))
        except Exception as error:
            # An exception that a payload causes fails only its own job.
            logger.error(
                "job %s: it made validation fail with %s at %s",
                pulled.job_id,
                type(error).__name__,
                _place(error),
            )
            self._fail(pulled, "invalid_job", f"the job can't be read: {type(error).__name__}")
        else:
            if not running.is_complete:
                return running
            self._succeed(running)
        return None

    def _succeed(self, job: RunningJob) -> None:
        """End a job whose result was fully checkpointed but not committed."""
        self._reporter.end(self._reporter.result_write(job, None))

    def _fail(self, pulled: PulledJob, code: str, message: str) -> None:
        self._counters.job_failures.inc(code)
        self._reporter.end(failed(self._queue.queue, pulled, ErrorInfo(code=code, message=message)))

    def _announcement(self, job: RunningJob) -> Any:
        progress = Progress(
            phase="prefill", prompt_tokens=len(job.prompt_token_ids), max_tokens=job.max_tokens * job.params.n
        )
        return transitions.checkpoint(
            self._queue.queue, job.job_id, job.token, progress, (), restart=job.restart_checkpoint
        )

    def _announce(self, calls: list[Any]) -> list[Any]:
        """Send until the server has answered: half-started jobs must not be dropped."""
        while True:
            try:
                return self._queue.run_many(calls)
            except RedisUnavailable:
                if self._stop.is_set():
                    raise  # they were not started: their leases lapse and no attempt is counted
                self._wait_for_redis()

    def _start(self, job: RunningJob) -> None:
        job.restart_checkpoint = False
        if not self._table.start(job, self._send):
            return
        self._counters.resumed_tokens.inc(job.resumed_tokens)
        self._journal.started(job)

    def _send(self, job: RunningJob) -> None:
        resume: list[SampleState] | None = sample_states(job.samples) if job.resumed_tokens else None
        job.sent_at = self._clock.now()
        self._engine.add(
            AddRequest(
                request_id=job.request_id,
                prompt_token_ids=job.prompt_token_ids,
                params=job.params,
                task=job.task,
                priority=PRIORITIES[job.job.priority],
                arrival=job.pulled.submitted_at,
                resume=resume,
                adapter=job.adapter,
                cache_salt=job.job.tenant,  # a tenant must not learn another's prompts by timing
            )
        )


def _place(error: BaseException) -> str:
    """Return where `error` was raised. Not its message or source lines, which may quote the prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
