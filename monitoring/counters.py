"""A worker's counters. Plain Python: counting does not need a metrics library."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Generic, Literal, TypeVar, get_args

from pagemill.common.error_codes import FINAL_CODES
from pagemill.engine.outputs import Histogram, HistogramSnapshot

Delivery = Literal["first", "redelivered"]
Outcome = Literal["succeeded", "failed", "cancelled", "expired", "dead"]
RetryReason = Literal["engine_error", "output_invalid", "store_unavailable"]
RenewalResult = Literal["renewed", "lost", "error"]
CommitResult = Literal["committed", "fenced", "already_done", "error"]
ProgressResult = Literal["written", "refused"]
BlockReason = Literal["kv", "rows", "loading", "engine", "paused", "rate", "draining", "redis", "results",
    "quarantined"]  # fmt: skip
JobCause = Literal[
    "queued", "opening", "adapter", "grammar", "sequence_slot", "kv_block", "step_budget", "prompt", "decode",
    "displaced", "preempted", "commit",
]  # fmt: skip
"""Causes of jobs' time, with the names of `pagemill why`; queued: all time before the first execution."""
EstimateOutcome = Literal["p50", "p90", "late"]
WebhookResult = Literal["delivered", "failed", "given_up", "refused"]
WebhookState = Literal["due", "in_flight", "later"]
RedisErrorKind = Literal["connection", "timeout", "response", "other"]
WorkerState = Literal["starting", "ready", "paused", "draining", "quarantined", "degraded"]
CanaryResult = Literal["clean", "alone", "disputed", "deviates", "failed"]

_NOT_OF_WORKERS = {
    "unknown_model", "unknown_parent", "dependency_cycle", "too_many_children", "idempotency_conflict",
}  # fmt: skip
FAILURE_CODES = tuple(sorted(FINAL_CODES - _NOT_OF_WORKERS)) + get_args(RetryReason)
"""Error codes of an execution on a worker. A job of an unserved model is never pulled; one ended by
the queue or its clock does not have an execution."""

WAIT_SECONDS = (0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800, 3600, 7200, 21600, 86400)
"""A job can wait for minutes in a backlog or overnight in a batch."""
REDIS_SECONDS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5)
RATIOS = (0.1, 0.25, 0.5, 0.75, 0.9, 1, 1.1, 1.25, 1.5, 2, 3, 5, 10)
ATTEMPTS = (1, 2, 3, 5, 10)
BYTES = (256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216)
REDIS_COMMANDS = (
    "pull", "renew", "checkpoint", "commit", "retry", "release", "heartbeat", "sweep", "stats", "workers", "other",
)  # fmt: skip
"""The worker's transitions, alone or in a pipeline; rare ones count as `other`."""

Label = TypeVar("Label", bound=str)


class Counts(Generic[Label]):
    """A counter per label value, all present from the start. An undeclared value counts as `other`.

    Adding it would make the number of series unbounded, and an exception here would fail a job: a metric does
    not justify either.
    """

    def __init__(self, lock: threading.Lock, values: Iterable[str]) -> None:
        self._lock = lock
        self._counts: dict[str, float] = dict.fromkeys(values, 0)

    def inc(self, value: Label, amount: float = 1) -> None:
        with self._lock:
            key = value if value in self._counts else "other"
            self._counts[key] = self._counts.get(key, 0) + amount

    def read(self) -> dict[str, float]:
        with self._lock:
            return dict(self._counts)


class Counter:
    """A counter without labels."""

    def __init__(self, lock: threading.Lock) -> None:
        self._lock = lock
        self._count = 0.0

    def inc(self, amount: float = 1) -> None:
        with self._lock:
            self._count += amount

    def read(self) -> float:
        return self._count


class Observations:
    """A thread-safe histogram."""

    def __init__(self, lock: threading.Lock, bounds: tuple[float, ...]) -> None:
        self._lock = lock
        self._histogram = Histogram(bounds)

    def observe(self, value: float) -> None:
        with self._lock:
            self._histogram.observe(value)

    def read(self) -> HistogramSnapshot:
        with self._lock:
            return self._histogram.snapshot()


class ObservationsBy:
    """A histogram per label value, all present from the start; an undeclared value counts as `other`."""

    def __init__(self, lock: threading.Lock, values: Iterable[str], bounds: tuple[float, ...]) -> None:
        self._lock = lock
        self._histograms = {value: Histogram(bounds) for value in values}

    def observe(self, label: str, value: float) -> None:
        with self._lock:
            self._histograms[label if label in self._histograms else "other"].observe(value)

    def read(self) -> dict[str, HistogramSnapshot]:
        with self._lock:
            return {label: histogram.snapshot() for label, histogram in self._histograms.items()}


class WorkerCounters:
    """A worker's counters and gauges.

    Safe from any thread. One lock guards all counts and is held for one addition, so that no thread waits for
    a scrape. The plain attributes at the end are written by the worker and read at scrape time.
    """

    def __init__(self) -> None:
        lock = threading.Lock()
        self.jobs_received: Counts[Delivery] = Counts(lock, get_args(Delivery))
        """Jobs pulled; `redelivered`: another execution had started it."""
        self.jobs_finished: Counts[Outcome] = Counts(lock, get_args(Outcome))
        """Jobs whose final state this worker committed."""
        self.job_failures: Counts[str] = Counts(lock, FAILURE_CODES)
        """Executions that ended with an error, by its code, including those that will be retried."""
        self.job_retries: Counts[RetryReason] = Counts(lock, get_args(RetryReason))
        self.jobs_requeued = Counter(lock)
        """Jobs returned to the queue unfinished, at drain or because they had not started."""
        self.resumed_tokens = Counter(lock)
        """Tokens restored from checkpoints instead of being generated again."""
        self.webhooks: Counts[WebhookResult] = Counts(lock, get_args(WebhookResult))
        self.regenerated_tokens = Counter(lock)
        """Output to be generated again: past the checkpoint when a lease was lost, or in a checkpoint that
        could not be resumed. Tokens that a killed worker had not checkpointed can't be counted."""
        self.discarded_tokens: Counts[Literal["cancelled", "fenced"]] = Counts(lock, ("cancelled", "fenced"))
        """Generated tokens that are never delivered."""

        self.lease_renewals: Counts[RenewalResult] = Counts(lock, get_args(RenewalResult))
        self.leases_lost = Counter(lock)
        self.canaries: Counts[CanaryResult] = Counts(lock, get_args(CanaryResult))
        """Results of canary jobs. alone: no other worker has completed the canary yet."""
        self.commits: Counts[CommitResult] = Counts(lock, get_args(CommitResult))
        """fenced: the discarded result of a stale token. already_done: a commit repeated after a lost reply."""
        self.progress_writes: Counts[ProgressResult] = Counts(lock, get_args(ProgressResult))

        self.admission_blocked_seconds: Counts[BlockReason] = Counts(lock, get_args(BlockReason))
        """Time in which no job could be pulled, by cause."""
        self.redis_errors: Counts[RedisErrorKind] = Counts(lock, get_args(RedisErrorKind))
        self.redis_reconnects = Counter(lock)
        self.redis_clock_skew_s = 0.0
        """The server's clock minus this machine's, when they were last compared."""

        self.queue_wait_seconds = Observations(lock, WAIT_SECONDS)
        """Time from submit (or the retry's due time) to the pull."""
        self.e2e_seconds = Observations(lock, WAIT_SECONDS)
        """Time from submit to the committed end."""
        self.job_seconds: Counts[JobCause] = Counts(lock, get_args(JobCause))
        """Jobs' time by cause, counted when an execution ends here."""
        self.estimates: Counts[EstimateOutcome] = Counts(lock, get_args(EstimateOutcome))
        """Successful jobs with an estimate, by completion within their p50, their p90 or neither."""
        self.estimate_ratio = Observations(lock, RATIOS)
        """Their time divided by that of their p50."""
        self.attempts = Observations(lock, ATTEMPTS)
        """Executions per finished job."""
        self.commit_seconds = Observations(lock, REDIS_SECONDS)
        self.payload_bytes = Observations(lock, BYTES)
        self.result_bytes = Observations(lock, BYTES)
        self.redis_seconds = ObservationsBy(lock, REDIS_COMMANDS, REDIS_SECONDS)
        """Round trips by transition."""

        self._start_gauges()

    def _start_gauges(self) -> None:
        """Initialize the plain values that the worker writes and a scrape reads."""
        self.state: WorkerState = "starting"
        self.started_at = time.time()
        """Unix seconds."""
        self.redis_up = False
        self.oldest_running_job_s = 0.0
        """Age of the longest-running job, since its pull; 0 without any."""
        self.leases_held = 0
        self.credit_sequences = 0
        """Maximum number of sequences that the last pull requested."""
        self.credit_blocks = 0
        """KV blocks that the last pull could have filled."""
        self.results_buffered = 0
        """Finished results held in memory until Redis accepts them."""
        self.results_buffered_bytes = 0
        self.webhooks_pending: dict[str, int] = dict.fromkeys(get_args(WebhookState), 0)
        """Pending webhooks when this worker last read them. later: failed before, or sent by another worker."""
        self.webhook_receivers_paused = 0
        """Receivers that this worker temporarily does not call, because they failed repeatedly."""
        self.model_load_seconds = 0.0
