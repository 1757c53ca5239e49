"""Admission: pulls as many jobs as the engine has capacity for, and turns them into requests.

A pulled job is invisible to other workers, so none is pulled only to wait here. Capacity is counted in rows
and in KV tokens: the free or evictable blocks, less the expected growth of running requests.
"""

from __future__ import annotations

import logging
import math
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pagemill.common.backoff import Backoff
from pagemill.common.bounds import InvalidParameter
from pagemill.engine.errors import InvalidRequest, LacksAbility
from pagemill.engine.outputs import Capacity
from pagemill.monitoring.counters import BlockReason
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.envelope import is_stored, open_envelope
from pagemill.producer.wire.process.repeated_errors import IN_LOOP, RepeatedErrors
from pagemill.producer.wire.schema.errors import InvalidJob, JobError, QueueFull, RedisUnavailable
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.schema.sealing import ring
from pagemill.producer.wire.webhooks.policy import Refused, WebhookPolicy
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.engine_host.messages import EngineState
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.images import ImageInputs
from pagemill.worker.jobs.intake import running_job
from pagemill.worker.jobs.leases import LeaseKeeper
from pagemill.worker.jobs.reporter import ProgressReporter
from pagemill.worker.jobs.running_job import Outcome, RunningJob
from pagemill.worker.jobs.store.inputs import NUM_THREADS, StoredInputs
from pagemill.worker.pull_control import PullState

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

DOORBELL_S = 0.5
"""Maximum sleep of an idle worker before it polls for jobs and sweeps anyway."""
BLOCKED_POLL_S = 0.25
FETCHING_S = 0.05
"""The same while payloads are being fetched."""
LONG_STEP_S = 2.0
"""While a step takes longer, jobs are left to other workers."""
MAX_JOBS_PER_PULL = 64
MAX_FETCHING = 2 * NUM_THREADS
"""Maximum number of payloads being fetched from the store."""
JOBS_PER_START = 16
"""Jobs announced and started together: the engine starts while the rest are prepared."""
_IMAGE = b'"image_url"'
"""Occurs in the envelope of a job with images; encrypted ones are decoded on this thread."""
MAX_MEDIA_BYTES = 1 << 30
"""Bytes of prepared images of running jobs above which no job is started. They are held until their job ends."""
OUTPUT_RATIO_WEIGHT = 0.05


@dataclass(frozen=True, slots=True)
class Credit:
    """The capacity for jobs that may be pulled now. If it is zero, `blocked` has the reason."""

    jobs: int
    tokens: int
    block_size: int = 1
    blocked: BlockReason | None = None
    urgent_only: bool = False
    """The capacity is reserved for high-priority jobs, which may preempt running ones of low priority."""


class OutputForecast:
    """The fraction of max_tokens a job is expected to use: a moving average, 1.0 until there is data."""

    def __init__(self) -> None:
        self._ratio = 1.0

    def observe(self, job: RunningJob) -> None:
        used = job.generated_tokens / (job.max_tokens * job.params.n)
        self._ratio += OUTPUT_RATIO_WEIGHT * (used - self._ratio)

    def remaining(self, job: RunningJob) -> int:
        """Return the output tokens that a job is expected to add, over all its samples; at least one per sample."""
        expected = int(job.max_tokens * self._ratio) * job.params.num_sequences
        return max(job.params.num_sequences, expected - job.generated_tokens)


def credit(engine: EngineHost, running: list[RunningJob], forecast: OutputForecast) -> Credit:
    """Compute the engine's capacity for more jobs.

    Rows: the engine's, minus those that its requests will occupy after its next step, since a job pulled
    during a step is ready when the next one is planned. Tokens: the blocks available after the last step,
    minus the expected growth; a request that is not counted yet will grow by its full size.
    """
    capacity, stats = engine.capacity, engine.stats
    if capacity is None or stats is None or engine.state is EngineState.LOADING:
        return Credit(0, 0, blocked="loading")
    if engine.state is EngineState.HELD:
        return Credit(0, 0, blocked="results")
    if engine.stalled_for() > LONG_STEP_S:
        return Credit(0, 0, blocked="engine")
    live = [job for job in running if not job.has_left_engine]
    if _media_bytes(live) >= MAX_MEDIA_BYTES:
        return Credit(0, 0, blocked="rows")
    waits = stats.adapters.waiting > 0
    most = stats.loaded.max_num_seqs if capacity.rows is None else capacity.rows
    rows = most - sum(
        job.params.num_sequences
        for job in live
        if not (job.is_about_to_end or (waits and job.waits_for_adapter))
    )
    tokens = _free_tokens(capacity, live, forecast)
    if rows <= 0 and capacity.rows is not None:
        return Credit(0, 0, blocked="rows")
    if rows <= 0:
        return _urgent_credit(
            live, rows, stats.loaded.max_num_seqs, Credit(0, max(0, tokens), capacity.block_size)
        )
    if tokens <= 0 and live:
        return Credit(0, 0, blocked="kv")
    return Credit(min(rows, MAX_JOBS_PER_PULL), max(0, tokens), capacity.block_size)


def _media_bytes(jobs: list[RunningJob]) -> int:
    return sum(job.media_bytes for job in jobs)


def _free_tokens(capacity: Capacity, live: list[RunningJob], forecast: OutputForecast) -> int:
    """Return the tokens of further jobs that the available blocks hold once running jobs have grown.

    If layers have windows, a token takes fewer blocks the longer its job is. Further jobs are assumed to be
    as long as the running ones, or without any, to need a block in every group of layers.
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
    """Compute the capacity for urgent jobs in an engine without free rows, which may preempt low-priority jobs.

    `rows` is 0, or negative by the number of requested rows beyond the engine's.
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
        reporter: ProgressReporter,
        leases: LeaseKeeper,
        webhooks: WebhookPolicy,
        pulling: Callable[[], PullState | None] = lambda: None,
    ) -> None:
        """`pulling`: the operator's decision; None: pull."""
        self._queue = queue
        self._pulling = pulling
        self._keys = context.hmac_keys
        self._webhooks = webhooks
        self._listeners = context.listeners
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
        self._open_envelope = partial(
            open_envelope, queue=queue.queue, keys=self._keys, keyring=ring(), store=store
        )
        self._images = ImageInputs(context.config.image_policy())
        self._inputs = (
            None if store is None else StoredInputs(self._open_ready, context.config.store_timeout_s)
        )
        self._pictured: StoredInputs | None = None
        """Jobs with images in the payload, whose decoding must not delay other jobs."""
        self.blocked: BlockReason | None = "loading"
        """The reason this worker can't pull; None if it can."""
        self.refusal: str | None = None
        """The error of the last pull, unless the server was unavailable: a worker that cannot pull is not ready."""

    def start(self, lanes: Callable[[], list[str]]) -> None:
        """`lanes`: the last parts of the lanes to pull from at the moment."""
        self._lanes = lanes
        self._thread.start()

    def stop(self) -> None:
        """Stop pulling. A pull in progress still passes its jobs to the engine."""
        self._stop.set()
        self._room.set()

    def join(self, timeout: float) -> bool:
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def recheck(self) -> None:
        """Poll for jobs now, after an operator has paused or resumed pulling."""
        self._room.set()

    def on_finished(self, job: RunningJob | None) -> None:
        """Poll for jobs again: `job` has left the engine, or is about to. Called on the reporter's thread."""
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
            except QueueFull as error:  # out of memory: only results can be written, and they free memory
                logger.warning("no jobs can be pulled: %s; trying again", error, extra=IN_LOOP)
                self._blocked_for("redis", DOORBELL_S)
            except Exception as error:
                logger.exception("pulling jobs failed; trying again")
                self.refusal = str(error)
                self._blocked_for("redis", self._backoff.next())
        self.blocked = "draining"
        for inputs in self._threaded():
            for pulled in inputs.abandon():
                self._reporter.end(pulled, Outcome.RELEASED)

    def _pull_once(self) -> None:
        self._room.clear()
        self._take_in_fetched()
        if (decided := self._pulling()) is not None:
            self._blocked_for("draining" if decided == "drained" else decided, DOORBELL_S)
            return
        room = credit(self._engine, self._table.running(), self._forecast)
        num_stored = self._inputs.num_pending if self._inputs is not None else 0
        num_pictured = self._pictured.num_pending if self._pictured is not None else 0
        num_fetching = num_stored + num_pictured
        if room.blocked is not None:
            self._blocked_for(room.blocked, FETCHING_S if num_fetching else BLOCKED_POLL_S)
            return
        if num_pictured >= MAX_JOBS_PER_PULL:
            self._blocked_for("rows", FETCHING_S)
            return
        self._counters.credit_sequences = room.jobs
        self._counters.credit_blocks = room.tokens // room.block_size
        lanes = self._servable_lanes()
        may_fetch = self._inputs is not None and num_stored < MAX_FETCHING
        # Up to half of the capacity is for jobs being fetched, so that a slow store does not stop other jobs.
        num_jobs = room.jobs - min(num_fetching, room.jobs // 2)
        reply = self._queue.pull(
            lanes,
            min(num_jobs, MAX_FETCHING - num_stored) if may_fetch else num_jobs,
            room.tokens,
            holding=len(self._table),
            longest=self._engine.engine.limits.max_model_len,
            urgent_only=room.urgent_only,
            has_store=may_fetch,
            lacks=self._engine.engine.lacks,
        )
        for pulled in reply.jobs:
            self._table.hold(pulled.job_id, pulled.token)
            self._listeners.received(pulled)
        if reply.paused:
            self._blocked_for("paused", DOORBELL_S)
        elif reply.jobs:
            self.blocked = None
            with self._requeued_on_error(reply.jobs):
                for start in range(0, len(reply.jobs), JOBS_PER_START):
                    self._take(reply.jobs[start : start + JOBS_PER_START])
        elif room.urgent_only:
            self._blocked_for("rows", BLOCKED_POLL_S)
        elif reply.queued and reply.limited_ms is not None:
            self._blocked_for("rate", min(DOORBELL_S, reply.limited_ms / 1000))
        elif reply.queued and len(self._table):
            # They need more capacity than there is, or wait for a suspect to end: the wake-up key would not help.
            self._blocked_for("kv", BLOCKED_POLL_S)
        else:
            self.blocked = None
            due_s = DOORBELL_S if reply.next_due_ms is None else reply.next_due_ms / 1000
            longest_s = FETCHING_S if num_fetching else DOORBELL_S
            self._queue.wait_for_doorbell(reply.bells or lanes, min(longest_s, due_s))

    def _servable_lanes(self) -> list[str]:
        """Return the lanes to pull from, without those of adapters while jobs wait for one to be loaded."""
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
        """Wait until the leases have been renewed: a pull sweeps, and would reclaim this worker's own lapsed ones."""
        away_since = time.monotonic()
        self.blocked = "redis"
        while not self._stop.is_set() and not self._leases.wait_renewed(away_since, BLOCKED_POLL_S):
            self._counters.admission_blocked_seconds.inc("redis", BLOCKED_POLL_S)

    def _take(self, pulled: list[PulledJob]) -> None:
        """Open, announce and start jobs. Jobs in the store start after they have been fetched."""
        at_hand: list[RunningJob | None] = []
        for item in pulled:
            if self._inputs is not None and is_stored(item.payload):
                self._inputs.fetch(item)
            elif _IMAGE in item.payload:
                self._pictured = self._pictured or StoredInputs(self._open_ready, math.inf)
                self._pictured.fetch(item)
            else:
                at_hand.append(self._prepare(item, partial(self._open_ready, item)))
        self._begin([job for job in at_hand if job is not None])

    def _take_in_fetched(self) -> None:
        """Start the jobs that have been fetched from the store, as far as images fit, and end invalid ones."""
        if not (threaded := self._threaded()):
            return
        held = _media_bytes([job for job in self._table.running() if not job.has_left_engine])
        jobs: list[RunningJob] = []
        fetched: list[PulledJob] = []
        with self._requeued_on_error(fetched):
            for inputs in threaded:
                while held < MAX_MEDIA_BYTES and (found := inputs.arrived()) is not None:
                    pulled, opened = found
                    fetched.append(pulled)
                    if (job := self._prepare(pulled, opened.result)) is not None:
                        jobs.append(job)
                        held += job.media_bytes
            self._begin(jobs)

    @contextmanager
    def _requeued_on_error(self, pulled: Sequence[PulledJob]) -> Iterator[None]:
        """Requeue the jobs that an unexpected error keeps from starting: this worker would hold them forever."""
        try:
            yield
        except RedisUnavailable:
            raise
        except Exception:
            for job in pulled:
                is_fetched = any(inputs.is_pending(job) for inputs in self._threaded())
                if not is_fetched and self._table.by_request(f"{job.job_id}#{job.token}") is None:
                    self._reporter.end(job, Outcome.RELEASED)
            raise

    def _threaded(self) -> list[StoredInputs]:
        return [inputs for inputs in (self._inputs, self._pictured) if inputs is not None]

    def _open_ready(self, pulled: PulledJob) -> Job:
        """Open an envelope, and prepare the job's images. Raises the errors of both."""
        job = self._open_envelope(pulled)
        return self._images.made_ready(job, self._engine.input_processor) if job.images else job

    def _begin(self, jobs: list[RunningJob]) -> None:
        if not jobs:
            return
        # Before a job's first step: only a job that entered a step can have crashed its worker.
        replies = self._announce([job.announcement(self._queue.queue) for job in jobs])
        for job, reply in zip(jobs, replies, strict=True):
            if reply == "stale":
                self._reporter.lost(job.job_id, job.token)
                continue
            job.restart_checkpoint = False
            job.sent_at = self._clock.now()
            job.opening_s = time.monotonic() - job.pulled.received_at
            if self._table.start(job, self._engine.add):
                self._listeners.started(job)
            if reply == "cancelled":
                self._reporter.cancelled(job.job_id)

    def _prepare(self, pulled: PulledJob, opened: Callable[[], Job]) -> RunningJob | None:
        """Create the record of a job to run; if that fails, only this job fails."""
        started_at = self._clock.now()
        try:
            job = opened()
            if job.webhook is not None:
                self._webhooks.check(job.webhook)
            running = running_job(
                pulled,
                job,
                self._engine.engine,
                queue=self._queue.queue,
                keys=self._keys,
                started_at=started_at,
            )
        except JobError as error:
            self._refuse(pulled, error)
        except Refused as error:
            self._refuse(pulled, JobError(str(error), "unsupported_feature"))
        except LacksAbility as error:
            self._reporter.end(pulled, Outcome.RELEASED, needs=error.words)
        except (InvalidJob, InvalidRequest, InvalidParameter) as error:
            self._refuse(pulled, JobError(str(error), error.code))
        except Exception as error:
            # An exception caused by a payload fails only its own job.
            name = type(error).__name__
            logger.error("job %s: it made validation fail with %s at %s", pulled.job_id, name, _place(error))
            self._refuse(pulled, JobError(f"the job can't be read: {name}", "invalid_job"))
        else:
            if not running.is_complete:
                return running
            self._reporter.end_complete(running)
        return None

    def _refuse(self, pulled: PulledJob, error: JobError) -> None:
        """End a job that never became a request, or delay it if its payload is unavailable."""
        outcome = Outcome.RETRIED if error.retryable else Outcome.FAILED
        info = ErrorInfo(code=error.code, message=error.message, retryable=error.retryable)
        self._reporter.end(pulled, outcome, info)

    def _announce(self, calls: list[Any]) -> list[Any]:
        """Send until the server has answered: partially started jobs must not be dropped."""
        while True:
            try:
                return self._queue.run_many(calls)
            except RedisUnavailable:
                if self._stop.is_set():
                    raise  # they were not started: their leases lapse and no attempt is counted
                self._wait_for_redis()


def _place(error: BaseException) -> str:
    """Return where `error` was raised, without its message or source lines, which may quote the prompt."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
