"""The reporter: takes the engine's outputs, writes progress and checkpoints, and commits jobs that have ended.

One thread and one connection. Writes are coalesced per job and sent in one round trip for all jobs. During a Redis
outage outputs are still received and ends are held; if they are too many, the engine stops stepping.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from pagemill.common.backoff import Backoff
from pagemill.common.error_codes import FINAL_CODES, RETRYABLE_CODES
from pagemill.engine.outputs import Capacity, RequestOutput
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.process.repeated_errors import RepeatedErrors
from pagemill.producer.wire.schema.errors import RedisUnavailable
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.schema.sealing import ring
from pagemill.worker.config import WorkerConfig
from pagemill.worker.engine_host.host import EngineHost
from pagemill.worker.job_queue import JobQueue
from pagemill.worker.jobs.context import WorkerContext
from pagemill.worker.jobs.ending import End, end
from pagemill.worker.jobs.running_job import MAX_RESULT_BYTES, Ending, Outcome, RunningJob
from pagemill.worker.jobs.store.results import StoredResults

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedErrors())

TICK_S = 0.2
"""The interval of deadline checks when nothing else happens."""
TAKE_S = 0.05
"""Maximum time to receive events between two writes."""
RELEASE_PATIENCE_S = 2.0
"""Maximum wait of a job being requeued for the engine's final output."""
MAX_STREAMS_OFTEN = 32
"""With more streams than these, tokens after the first are written half as often: each write costs a read, an
event and a packet per stream, which take CPU time from a model on the same machine."""
MAX_WRITES = 500
"""Maximum number of writes in one round trip."""
MAX_UNSAVED_LOGPROBS = 16_384
"""Maximum per round trip of checkpoints, during which they are objects. A single job may exceed it."""
TOO_LARGE = f"its result has more than {MAX_RESULT_BYTES >> 20} MiB: reduce n, max_tokens or logprobs"
CANCELLED = Ending(Outcome.CANCELLED, ErrorInfo(code="cancelled", message="the job was cancelled"))


@dataclass(frozen=True, slots=True)
class Lost:
    job_id: str
    token: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Request to stop the running job `job_id`, or all if it is None."""

    job_id: str | None
    ending: Ending


@dataclass(frozen=True, slots=True)
class EngineLost:
    """The engine has failed, and one of these requests may be the cause."""

    suspects: frozenset[str]


@dataclass(frozen=True, slots=True)
class Written:
    """A result that was written to the store, or could not be."""

    end: End


Event = list[RequestOutput] | Lost | Stop | EngineLost | End | Written


def is_checkpoint_due(job: RunningJob, config: WorkerConfig, now: float, streams: int = 1) -> bool:
    """Return True if a running job's progress should be written now (monotonic seconds), for that many streams."""
    if job.is_progress_saved and not job.has_unsaved:
        return False
    if job.unsaved_tokens >= config.checkpoint_tokens:
        return True
    if job.is_saved_often:
        if job.unsaved_tokens and not job.has_saved_tokens:
            return True  # its first token is written immediately
        slower = streams > MAX_STREAMS_OFTEN
        # Compares with a deadline, since (t + 0.1) - t rounds to less than 0.1 for many t.
        return now >= job.saved_at + config.stream_checkpoint_s * (2 if slower else 1)
    if job.is_about_to_end:
        return False  # its final write follows shortly and contains everything
    # The interval starts at the first unsaved token: before it there was nothing to lose.
    return now >= max(job.saved_at, job.unsaved_since) + config.checkpoint_s


def _round_trips(jobs: Sequence[RunningJob]) -> Iterator[list[RunningJob]]:
    """Group the jobs by round trip."""
    chosen: list[RunningJob] = []
    logprobs = 0
    for job in jobs:
        logprobs += job.unsaved_logprobs
        if chosen and (len(chosen) == MAX_WRITES or logprobs > MAX_UNSAVED_LOGPROBS):
            yield chosen
            chosen, logprobs = [], job.unsaved_logprobs
        chosen.append(job)
    if chosen:
        yield chosen


class ProgressReporter:
    """Owns the records of all running jobs; other threads send it events."""

    def __init__(
        self,
        context: WorkerContext,
        queue: JobQueue,
        *,
        on_finished: Callable[[RunningJob | None], None],
        results: StoredResults | None = None,
    ) -> None:
        """`on_finished` is called when a job has left the engine, or is about to, so that more can be pulled;
        with the job, if it is known and ended without being stopped."""
        self._config = context.config
        self._queue = queue
        self._table = context.table
        self._clock = context.clock
        self._counters = context.counters
        self._listeners = context.listeners
        self._on_finished = on_finished
        self._hmac_keys = context.hmac_keys
        self._speed = context.speed
        self._events: SimpleQueue[Event] = SimpleQueue()
        self._ended: dict[str, End] = {}
        self._results = results
        self._storing: dict[str, float] = {}
        """Ended jobs whose results are written to the store, until the `time.monotonic()` after which Redis is used."""
        self._stopping: dict[str, float] = {}
        self._engine: EngineHost | None = None
        self._is_holding = False
        self._is_abandoning = False
        self._give_up_at: float | None = None
        self._backoff = Backoff()
        self._retry_at = 0.0
        self._thread = threading.Thread(target=self._run, name="pagemill-reporter", daemon=True)

    def start(self, engine: EngineHost) -> None:
        self._engine = engine
        if self._results is not None:
            self._results.start(lambda end: self._events.put(Written(end)))
        self._thread.start()

    def stop(self, timeout: float, *, abandon: bool = False) -> bool:
        """Write everything pending, within `timeout` seconds; True if nothing is left.

        `abandon`: do not wait for jobs that are still in the engine.
        """
        self._is_abandoning = abandon
        self._give_up_at = time.monotonic() + timeout
        self._events.put([])
        if self._thread.ident is not None:
            self._thread.join(timeout + 1.0)
        if self._results is not None:
            self._results.stop()
        return not self._ended and not self._table.running() and not self._thread.is_alive()

    @property
    def is_alive(self) -> bool:
        return self._thread.is_alive()

    def deliver(self, outputs: list[RequestOutput]) -> None:
        """Receive a batch of the engine's outputs; called on the engine's thread."""
        self._events.put(outputs)

    def end(
        self,
        pulled: PulledJob,
        outcome: Outcome,
        error: ErrorInfo | None = None,
        *,
        needs: Sequence[str] = (),
    ) -> None:
        """End a job that never became a request. `needs`: as for `end` of ending.py."""
        self._events.put(end(self._queue.queue, pulled, outcome, error, needs=needs))

    def end_complete(self, job: RunningJob) -> None:
        """End a job whose checkpoint contains all of its output."""
        self._events.put(self._completed(job, None))

    def lost(self, job_id: str, token: int) -> None:
        self._events.put(Lost(job_id, token))

    def cancelled(self, job_id: str) -> None:
        self._events.put(Stop(job_id, CANCELLED))

    def hand_back_all(self) -> None:
        """Stop every running job, checkpoint it and release it."""
        self._events.put(Stop(None, Ending(Outcome.RELEASED)))

    def distrust_all(self) -> None:
        """Stop all running jobs and requeue them without checkpoints, because this worker computes wrong results."""
        self._events.put(Stop(None, Ending(Outcome.DISTRUSTED)))

    def engine_lost(self, suspects: frozenset[str]) -> None:
        """Checkpoint every job, requeue those whose requests are not suspects, and let the other leases lapse."""
        self._events.put(EngineLost(suspects))

    def _run(self) -> None:
        while not self._is_done():
            try:
                self._take_events()
                self._check_clocks()
                if time.monotonic() >= self._retry_at:
                    self._write()
                self._bound_buffer()
            except RedisUnavailable:
                self._counters.commits.inc("error", len(self._ended))
                self._retry_at = time.monotonic() + self._backoff.next()
            except Exception:
                logger.exception("the reporter failed in one of its tasks; continuing")
                self._retry_at = time.monotonic() + self._backoff.next()

    def _is_done(self) -> bool:
        if self._give_up_at is None:
            return False
        waits_for = 0 if self._is_abandoning else len(self._table.running())
        settled = not self._ended and not waits_for and self._events.empty()
        return settled or time.monotonic() >= self._give_up_at

    def _take_events(self) -> None:
        """Wait for an event, then process those pending, within a limit: a fast engine must not delay writes."""
        try:
            event = self._events.get(timeout=self._wait_s())
            until = time.monotonic() + TAKE_S
            while True:
                self._handle(event)
                if time.monotonic() >= until:
                    return
                event = self._events.get_nowait()
        except Empty:
            pass

    def _wait_s(self) -> float:
        now = time.monotonic()
        if any(not self._is_storing(key, now) for key in self._ended):
            return min(TICK_S, max(0.0, self._retry_at - now))
        if any(job.is_saved_often and job.unsaved_tokens for job in self._table.running()):
            return min(TICK_S, self._config.stream_checkpoint_s)
        return TICK_S

    def _handle(self, event: Event) -> None:
        match event:
            case Lost(job_id, token):
                self._drop(job_id, token)
            case Stop(None, ending):
                for job in self._table.running():
                    self._begin_stop(job, ending)
            case Stop(str() as job_id, ending):
                if (running := self._table.by_job(job_id)) is not None:
                    self._begin_stop(running, ending)
            case EngineLost(suspects):
                for job in self._table.running():
                    if job.request_id not in self._ended:
                        is_suspect = job.request_id in suspects
                        job.ending = job.ending or Ending(Outcome.LAPSED if is_suspect else Outcome.RELEASED)
                        self._finish(job, None)
            case End():
                self._hold(event)
            case Written(ended):
                if self._storing.pop(ended.key, None) is not None and ended.key in self._ended:
                    self._ended[ended.key] = ended
                else:
                    self._discard(ended)
            case list():
                for output in event:
                    try:
                        self._take_output(output)
                    except Exception as error:  # of one job; the other outputs of the step are not lost
                        self._fail_output(output, error)

    def _fail_output(self, output: RequestOutput, error: Exception) -> None:
        logger.exception("request %s: its output cannot be processed", output.request_id)
        job = self._table.by_request(output.request_id)
        if job is None or job.request_id in self._ended:
            return
        message = f"the output cannot be processed: {type(error).__name__}"
        if output.finished:
            self._stopping.pop(job.request_id, None)
            job.left_engine_at = self._clock.now()
            job.has_left_engine = True
            self._hold(self._failed(job, "output_invalid", message))
            self._on_finished(None)
        else:
            info = ErrorInfo(code="output_invalid", message=message, retryable=True)
            self._begin_stop(job, Ending(Outcome.RETRIED, info))

    def _take_output(self, output: RequestOutput) -> None:
        job = self._table.by_request(output.request_id)
        if job is None or job.request_id in self._ended:
            return  # lost or requeued meanwhile: it must not be reported
        job.apply(output)
        if output.finished:
            self._finish(job, output)
        elif job.is_too_large and job.ending is None:
            self._begin_stop(
                job, Ending(Outcome.FAILED, ErrorInfo(code="result_too_large", message=TOO_LARGE))
            )
        elif output.deltas and job.is_about_to_end:
            self._on_finished(None)

    def _finish(self, job: RunningJob, output: RequestOutput | None) -> None:
        """End a job that the engine has finished, or, with None, whose last output did not arrive in time."""
        self._stopping.pop(job.request_id, None)
        job.left_engine_at = self._clock.now()
        if job.ending is not None and job.ending.outcome is Outcome.DISTRUSTED:
            ended = end(self._queue.queue, job, Outcome.DISTRUSTED)
        elif output is not None and output.error_code is not None:
            ended = self._failed(job, output.error_code, output.error or output.error_code)
        elif job.is_complete:
            ended = self._completed(job, output)
        elif job.ending is not None:
            ended = end(self._queue.queue, job, job.ending.outcome, job.ending.error)
        elif output is not None and output.let_go is not None:
            ended = end(self._queue.queue, job, Outcome(output.let_go))
        else:
            ended = self._failed(job, "engine_error", "the engine ended the job without a reason")
        job.has_left_engine = True
        job.ttft_s = output.ttft_s if output is not None else None
        self._hold(ended)
        self._on_finished(job if job.is_complete else None)

    def _hold(self, ended: End) -> None:
        """Hold an end until it is written; a large result is first written to the store."""
        self._ended[ended.key] = ended
        if self._results is not None and self._results.takes(ended):
            self._storing[ended.key] = time.monotonic() + self._config.store_timeout_s
            self._results.write(ended)

    def _is_storing(self, key: str, now: float) -> bool:
        """Return whether a result is still being written to the store. Near the end of a drain, return False."""
        is_late = self._give_up_at is not None and now >= self._give_up_at - RELEASE_PATIENCE_S
        return not is_late and now < self._storing.get(key, 0.0)

    def _discard(self, ended: End) -> None:
        if self._results is not None and ended.stored:
            self._results.discard(ended.stored)

    def _completed(self, job: RunningJob, output: RequestOutput | None) -> End:
        """End a complete job with its result, or with an error if that is too large. For any thread."""
        assert self._engine is not None, "outputs come from an engine"
        try:
            body = job.result_json(output, tier=self._engine.engine.tier, now=self._clock.now())
        except Exception as error:
            logger.exception("job %s: its result cannot be written as JSON", job.job_id)
            return self._failed(
                job, "output_invalid", f"the result cannot be written: {type(error).__name__}"
            )
        if len(body) > MAX_RESULT_BYTES:
            return self._failed(job, "result_too_large", TOO_LARGE)
        sealed = ring().seal(body, "result", job.job_id)
        return end(self._queue.queue, job, Outcome.SUCCEEDED, result=sealed)

    def _failed(self, job: RunningJob, code: str, message: str) -> End:
        outcome = Outcome.FAILED if code in FINAL_CODES else Outcome.RETRIED
        if code not in FINAL_CODES | RETRYABLE_CODES:
            code = "engine_error"
        error = ErrorInfo(code=code, message=message, retryable=outcome is Outcome.RETRIED)
        return end(self._queue.queue, job, outcome, error)

    def _begin_stop(self, job: RunningJob, ending: Ending) -> None:
        """Ask the engine to stop the job; the job ends with its last output."""
        if job.ending is not None or job.request_id in self._ended:
            return
        assert self._engine is not None, "jobs run only once there is an engine"
        job.ending = ending
        self._stopping[job.request_id] = time.monotonic() + RELEASE_PATIENCE_S
        self._engine.abort(job.request_id)

    def _check_clocks(self) -> None:
        now = time.monotonic()
        for job in self._table.running():
            if job.expires_at is not None and now >= job.expires_at:
                error = ErrorInfo(code="deadline_exceeded", message=job.expiry_message)
                self._begin_stop(job, Ending(Outcome.EXPIRED, error))
        for request_id, patience in list(self._stopping.items()):
            stalled = self._table.by_request(request_id)
            if stalled is None:
                del self._stopping[request_id]
            elif now >= patience:
                self._finish(stalled, None)

    def _drop(self, job_id: str, token: int) -> None:
        """Stop an execution whose lease has lapsed, without a report."""
        job = self._table.by_request(f"{job_id}#{token}")
        if not self._table.release(job_id, token) and job is None:
            return
        # Its commit may have succeeded although the reply was lost; an unused file is deleted within the hour.
        self._ended.pop(f"{job_id}#{token}", None)
        if job is not None and self._engine is not None:
            self._engine.abort(job.request_id)
        self._on_finished(None)
        self._listeners.lost(job_id, token, job)

    def _write(self) -> None:
        now, running = time.monotonic(), self._table.running()
        streams = sum(job.is_saved_often for job in running)
        due = [job for job in running if self._is_due(job, now, streams)]
        for jobs in _round_trips(due):
            self._write_checkpoints(jobs)
        ended = [
            one
            for key, one in self._ended.items()
            if not self._lacks_checkpoint(one) and not self._is_storing(key, now)
        ]
        for start in range(0, len(ended), MAX_WRITES):
            self._write_ends(ended[start : start + MAX_WRITES])
        self._backoff.reset()

    def _is_due(self, job: RunningJob, now: float, streams: int) -> bool:
        if job.request_id in self._ended:
            return self._lacks_checkpoint(self._ended[job.request_id])
        return is_checkpoint_due(job, self._config, now, streams)

    def _lacks_checkpoint(self, ended: End) -> bool:
        job = self._table.by_request(ended.key)
        return (
            ended.needs_checkpoint and job is not None and job.has_unsaved and not job.is_checkpoint_refused
        )

    def _write_checkpoints(self, jobs: Sequence[RunningJob]) -> None:
        assert self._engine is not None, "jobs run only once there is an engine"
        now, keys = self._clock.now(), ring()
        capacity = self._engine.capacity
        for job in jobs:
            job.kv_blocks = 0 if capacity is None else _held_blocks(job, capacity)
        calls = [job.checkpoint_call(self._queue.queue, now, self._hmac_keys, keys) for job in jobs]
        replies = self._queue.run_many(calls)
        for job, reply in zip(jobs, replies, strict=True):
            self._counters.progress_writes.inc("written" if reply in ("ok", "cancelled") else "refused")
            if reply == "stale":
                self._drop(job.job_id, job.token)
            elif reply == "bad_offset" and not job.restart_checkpoint:
                logger.error(
                    "job %s: its stored checkpoint is not what was written; writing it again", job.job_id
                )
                job.start_over()
            elif reply == "bad_offset" or isinstance(reply, Exception):
                logger.error("job %s: the server rejects its checkpoint: %s", job.job_id, reply)
                job.saved_at = time.monotonic()
                job.is_checkpoint_refused = job.request_id in self._ended
            else:
                job.mark_saved(time.monotonic())
                if reply == "cancelled":
                    self._begin_stop(job, CANCELLED)

    def _write_ends(self, ends: Sequence[End]) -> None:
        began, began_at = time.monotonic(), self._clock.now()
        replies = self._queue.run_many([one.call for one in ends])
        if self._config.durability == "fsync":
            self._queue.sync()  # until then a server crash may lose them, so they are held here
        self._counters.commit_seconds.observe(time.monotonic() - began)
        taken = sum(job.params.num_sequences for job in self._table.running())
        for one, reply in zip(ends, replies, strict=True):
            self._ended.pop(one.key, None)
            self._storing.pop(one.key, None)
            if reply not in ("committed", "already_done"):
                self._discard(one)
            self._table.release(one.job_id, one.token)
        for one, reply in zip(ends, replies, strict=True):
            name, error = one.name_of(reply), reply if isinstance(reply, Exception) else None
            self._listeners.ended(one, name, began_at, error)
            if name == "succeeded" and one.job is not None:
                self._measure(one.job, taken)

    def _measure(self, job: RunningJob, taken: int) -> None:
        """Include a successful job in the worker's speed; `taken` rows were occupied at its end."""
        stats = self._engine.stats if self._engine is not None else None
        if stats is not None and stats.loaded.max_num_seqs and job.left_engine_at is not None:
            row_seconds = (job.left_engine_at - job.started_at) * job.params.num_sequences
            self._speed.ended(job.pulled.cost, row_seconds, taken / stats.loaded.max_num_seqs)

    def _bound_buffer(self) -> None:
        """Bound the memory held during a Redis outage."""
        held_bytes = sum(len(one.body) for one in self._ended.values())
        self._counters.results_buffered = len(self._ended)
        self._counters.results_buffered_bytes = held_bytes
        too_much = (
            len(self._ended) >= self._config.max_held_results or held_bytes >= self._config.max_held_bytes
        )
        if too_much == self._is_holding or self._engine is None:
            return
        self._is_holding = too_much
        self._engine.hold(too_much)
        if too_much:
            logger.error(
                "%d results (%d bytes) wait for Redis: the engine stops until it takes them",
                len(self._ended),
                held_bytes,
            )
        else:
            logger.warning("held results are written: the engine continues")


def _held_blocks(job: RunningJob, capacity: Capacity) -> int:
    """Return the maximum KV blocks that a job's samples hold; they share those of the prompt."""
    if job.phase == "waiting":
        return 0
    prompt = job.prompt_tokens_done
    shared = capacity.blocks_for(prompt)
    growth = (
        capacity.blocks_for(prompt + len(sample.token_ids)) - shared
        for sample in job.samples
        if sample.finish_reason is None
    )
    return shared + sum(growth)
