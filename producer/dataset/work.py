"""The loop of a run: submit missing jobs, collect ended ones, with a bounded window in flight."""

from __future__ import annotations

import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pagemill.producer.client import flows, submit_flow
from pagemill.producer.client.effects import Flow, Wait
from pagemill.producer.client.sync import Producer
from pagemill.producer.client.tracing import publishing
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.remote_model import BUDGET_EXHAUSTED, Remote
from pagemill.producer.dataset.watch import Notify, RunWatch
from pagemill.producer.wire.calls import batches
from pagemill.producer.wire.schema.errors import JobNotFound, QueueFull, RedisUnavailable, StoreError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import BatchItem

logger = logging.getLogger(__name__)

WINDOW = 20_000
WINDOW_BYTES = 1 << 30
"""Maximum bytes of images of the jobs in the queue: with large ones, fewer jobs are in flight."""
CHUNK = 1_000
CHUNK_BYTES = 32 << 20
WAIT_S = 0.5
RUNS_PRIORITY: Final = "low"
RUNS_TENANT: Final = "dataset-runs"
"""Priority and tenant of jobs without one: they run after those that a caller waits for, in a separate lane. A producer
with a tenant keeps it."""
DEFAULT_TENANT: Final = "default"
PATIENCE_S = 300.0
"""Seconds for which a server may be unavailable during a run."""
LOST_AFTER_S = 10.0
"""Seconds without an event after which the run checks whether the server still knows the unfinished jobs."""


CONDITION_FALSE: Final = "condition_false"
PARENT_FAILED: Final = "parent_failed"
"""The codes of jobs that ended because of another job's end, which has been counted."""
_COUNTED_ELSEWHERE = (CONDITION_FALSE, PARENT_FAILED, BUDGET_EXHAUSTED)
_NOT_KEPT: Any = {"id": True, "metadata": True, "fingerprint": True, "outputs": {"__all__": {"token_ids"}}}
"""Token ids are unused, and the largest part."""


def warn(message: str, is_endless: bool) -> None:
    """Log a notice."""
    logger.warning("%s", message)


class TooManyErrors(Exception):
    """The run has more failures than allowed; the message contains the limit."""


@dataclass(slots=True)
class Tally:
    """The progress of a run for the progress bar. `latest` is the last failure's message.

    `settled`: rows without a job in this start: done in an earlier one, served by an equal row's job, or invalid.
    """

    settled: int = 0
    submitted: int = 0
    in_flight: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Jobs that did not have to run, because of how an earlier step of their row ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    latest: str = ""
    codes: dict[str, int] = field(default_factory=dict)
    files: tuple[int, int] | None = None
    """For a source of several files, the number of the one being read, and the total."""
    stages: dict[str, Tally] = field(default_factory=dict)
    """The later stages of a cascade by their models, or the later steps of a recipe: jobs, not rows. Only `in_flight`
    counts all together."""

    @property
    def all_failed(self) -> int:
        return self.failed + sum(stage.failed for stage in self.stages.values())

    def of(self, key: str) -> Tally:
        """Return the tally of a work's stage."""
        return self.stages.get(key.partition("~")[0].partition("@")[2], self)


@dataclass(frozen=True, slots=True)
class Work:
    """One job, with the key of its output."""

    key: str
    job: Job


Follower: TypeAlias = Callable[[], Iterator[Work | None]]
"""Yields work that depends on the outcomes of other work; None: the next is not known yet."""


def stage_key(key: str, model: str) -> str:
    """Return the key of the same work for the model of a cascade's later stage."""
    return f"{key}@{model}"


class WorkLoop:
    """Does the work of one run through one queue, and stores the outcomes in the journal."""

    def __init__(
        self,
        producer: Producer,
        journal: Journal,
        *,
        window: int = WINDOW,
        max_errors: int | None = None,
        on_news: Callable[[Tally], None] = lambda tally: None,
        on_notice: Notify = warn,
    ) -> None:
        """`on_notice` is called with the reason why the run waits, and whether it cannot continue without help."""
        self.tally = Tally()
        self.complaint: Callable[[str, Mapping[str, Any]], Failure | None] = lambda key, kept: None
        """Returns the reason why a result counts as failed, given its work's key and its form in the journal."""
        self._producer = producer
        self._journal = journal
        self._most = window
        self._images = 0
        """Characters of the images of all `_chosen` jobs."""
        self._chosen = 0
        self._max_errors = max_errors
        self._refused = 0
        """Number of rows that have no job because they cannot be read or rendered."""
        self._on_news = on_news
        self._watch = RunWatch(producer, on_notice)
        self._batch_id = ""
        self._position = 0
        self._reached = time.monotonic()
        self._following: list[Iterator[Work | None]] = []
        self.remote: Remote | None = None
        """The worker for a cascade's last stage, if it is not the queue."""
        own = producer.tenant if producer.tenant != DEFAULT_TENANT else RUNS_TENANT
        self._place = {"priority": RUNS_PRIORITY, "tenant": own}

    def run(
        self,
        works: Callable[[], Iterator[Work | Failure | None]],
        followers: Sequence[Follower] = (),
        *,
        collect: bool = True,
    ) -> None:
        """Do everything that `works` yields (otherwise for a row without a job), then `followers`, as outcomes arrive.

        All are called again if the server has lost jobs. `collect=False`: submit `works` only, to be collected later.
        Raises TooManyErrors and the producer's errors; everything collected by then is kept.
        """
        self._attach()
        self._reached = time.monotonic()
        is_first = True
        while True:
            self._following = [follower() for follower in followers]
            self._submit(self._items(works(), is_first=is_first), collect=collect)
            is_first = False
            if not collect or self._collect_rest():
                return
            while self.remote is not None and self.remote.in_flight:
                self._collect_remote(wait=True)
            self._new_batch()

    def cancel(self) -> int:
        """Cancel the jobs that this run, or an earlier one of the same journal, has not finished."""
        self._attach()
        try:
            return self._producer.batch(self._batch_id).cancel()
        except JobNotFound:
            return 0

    def _attach(self) -> None:
        """Resume the batch in the journal, if the server still knows it."""
        self._batch_id = self._journal.fact("batch_id") or ""
        self._position = int(self._journal.fact("position") or 0)
        if not self._batch_id or self._is_forgotten():
            self._new_batch()
        elif self._position:
            # The last run may have been killed between storing outputs and acknowledging them.
            self._producer.batch(self._batch_id).ack(f"e{self._position}")

    def _is_forgotten(self) -> bool:
        try:
            return self._producer.batch(self._batch_id).counts().ended < self._position
        except JobNotFound:
            return self._position > 0

    def _new_batch(self) -> None:
        self._batch_id, self._position = f"run-{secrets.token_hex(8)}", 0
        self._journal.forget_pending()
        self.tally.in_flight = 0
        self._watch.forget()
        with self._journal.transaction():
            self._journal.set_facts(batch_id=self._batch_id, position="0")

    def _items(self, works: Iterator[Work | Failure | None], *, is_first: bool) -> Iterator[Job]:
        for work in works:
            item = self._item(work) if isinstance(work, Work) else None
            if item is not None:
                yield item
            elif is_first:
                (self.tally.of(work.key) if isinstance(work, Work) else self.tally).settled += 1
                if isinstance(work, Failure):
                    self._refused += 1
                    self._check_errors(f"{work.code}: {work.message}")

    def _submit(self, items: Iterator[Job], *, collect: bool) -> None:
        while chunk := self._chunk(items):
            if collect:
                self._watch.sent(chunk)
            self._send(chunk)
            for job in chunk:
                self.tally.of(job.key or "").submitted += 1
            if collect:
                self._collect()
                while self.tally.in_flight > self._window:
                    self._collect(wait=True)
                self._follow()
            self._on_news(self.tally)

    def _chunk(self, jobs: Iterator[Job]) -> list[Job]:
        """Return the next jobs, only a few if their images are large."""
        chunk, size = [], 0
        for job in itertools.islice(jobs, CHUNK):
            chunk.append(job)
            size += sum(map(len, job.images))
            if size >= CHUNK_BYTES:
                break
        self._images += size
        self._chosen += len(chunk)
        return chunk

    @property
    def _window(self) -> int:
        """Return the maximum number of jobs in flight."""
        mean = self._images / max(1, self._chosen)
        return self._most if mean == 0 else min(self._most, max(1, int(WINDOW_BYTES / mean)))

    def _follow(self) -> int:
        """Submit newly known work, as far as the window allows. Returns the number of jobs."""
        count = 0
        for works in reversed(self._following):  # the work nearest to its end first
            known = itertools.takewhile(lambda work: work is not None, works)
            jobs = (
                job for job in (self._item(work) for work in known if work is not None) if job is not None
            )
            while self.tally.in_flight <= self._window and (chunk := self._chunk(jobs)):
                if self.remote is not None and chunk[0].model == self.remote.model.name:
                    self.remote.send(chunk)
                    self.tally.in_flight += len(chunk)
                else:
                    self._watch.sent(chunk)
                    self._send(chunk)
                self.tally.of(chunk[0].key or "").submitted += len(chunk)
                count += len(chunk)
        return count

    def _send(self, chunk: list[Job]) -> None:
        """Submit a chunk, even through a restart of the server or a full queue: the names make a retry idempotent."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._submit_chunk(chunk)
            except QueueFull as error:
                # Ended jobs are collected meanwhile: the run's own results may be what fills the server.
                self._watch.full(error)
                self._collect()
                self._check_watch()
                time.sleep(WAIT_S)
            except (RedisUnavailable, StoreError) as error:
                if time.monotonic() > give_up or not _may_pass(error):
                    raise
                self._wait_out(error)
            else:
                self.tally.in_flight += len(chunk)
                self._watch.accepted()
                return

    def _submit_chunk(self, chunk: list[Job]) -> None:
        """Submit jobs under their keys. An earlier start may have done so with another prompt for the same work.

        A step's prompt first has placeholders for unknown outputs, and later the outputs.
        """
        queue, preparer = self._producer.queue, self._producer.preparer
        with publishing(queue) as traceparent:
            items = preparer.items(
                chunk, self._batch_id, on_invalid="record", by_content=True, traceparent=traceparent
            )
            flow = submit_flow.submit_many(queue, self._batch_id, items, "raise", "record")
            self._producer.run_flow(flow)

    def _item(self, work: Work) -> Job | None:
        name = self._journal.needs(work.key)
        if name is None:
            return None
        place = {
            field: value for field, value in self._place.items() if field not in work.job.model_fields_set
        }
        return work.job.model_copy(update={"key": name, **place})

    def _collect_rest(self) -> bool:
        """Wait for the jobs in flight. False: the server no longer knows them."""
        self._collect()
        quiet_since = time.monotonic()
        while self._follow() or self.tally.in_flight:
            if self._collect(wait=True):
                quiet_since = time.monotonic()
            elif time.monotonic() - quiet_since > LOST_AFTER_S:
                at_remote = 0 if self.remote is None else self.remote.in_flight
                if self.tally.in_flight > at_remote and self._is_lost():
                    return False
                quiet_since = time.monotonic()
        return True

    def _is_lost(self) -> bool:
        try:
            counts = self._producer.batch(self._batch_id).counts()
        except JobNotFound:
            return True
        except RedisUnavailable:
            return False
        return counts.ended < self._position or (counts.done and counts.ended == self._position)

    def _collect(self, *, wait: bool = False) -> int:
        """Collect the work that has ended; returns the number of jobs."""
        collected = self._collect_remote()
        while True:
            try:
                page = self._producer.run_flow(_page(self._producer.queue, self._batch_id, self._position))
            except (RedisUnavailable, StoreError) as error:
                if time.monotonic() - self._reached > PATIENCE_S or not _may_pass(error):
                    raise
                self._wait_out(error)
                return collected
            self._reached = time.monotonic()
            self._watch.answered()
            if page.position > self._position:
                self._keep(page)
                collected += len(page.items)
                continue
            if wait and not collected:
                if self.remote is not None and self.remote.in_flight:
                    collected = self._collect_remote(wait=True)
                else:
                    self._producer.run_flow(_wait(self._batch_id))
                self._check_watch()
            self._on_news(self.tally)
            return collected

    def _collect_remote(self, *, wait: bool = False) -> int:
        """Collect the work that the remote model has finished; returns the number of items."""
        if self.remote is None or not self.remote.in_flight:
            return 0
        if wait:
            self.remote.wait(WAIT_S)
        with self._journal.transaction():
            done = self.remote.collect()
            for ended in done:
                self._end(ended.name, ended.kept, ended.failure)
        self.remote.start()
        self._check_errors()
        return len(done)

    def _check_watch(self) -> None:
        with contextlib.suppress(RedisUnavailable):  # the next read of the batch reports it
            self._watch.check()

    def _wait_out(self, error: RedisUnavailable | StoreError) -> None:
        """Wait briefly for a server or a store that does not answer."""
        if isinstance(error, RedisUnavailable):
            self._watch.lost(error, PATIENCE_S)
        self._on_news(self.tally)
        time.sleep(WAIT_S)

    def _keep(self, page: batches.Page) -> None:
        with self._journal.transaction():
            for item in page.items:
                self._record(item)
            self._journal.set_facts(position=str(page.position))
        self._position = page.position
        with contextlib.suppress(RedisUnavailable):  # acknowledged again with the next page
            self._producer.batch(self._batch_id).ack(f"e{page.position}")
        self._on_news(self.tally)
        self._check_errors()

    def _check_errors(self, latest: str = "") -> None:
        failed = self.tally.all_failed + self._refused
        if self._max_errors is not None and failed > self._max_errors:
            raise TooManyErrors(
                f"{failed} rows have failed, more than --max-errors {self._max_errors}; "
                f"the last one: {latest or self.tally.latest}"
            )

    def _record(self, item: BatchItem) -> None:
        kept = failure = None
        if item.result is not None:
            kept = item.result.model_dump(exclude=_NOT_KEPT) | {"created": int(time.time())}
        else:
            error = item.error
            code, message = (error.code, error.message) if error else (item.state, item.state)
            is_passing = item.state != "failed" or bool(error and error.retryable)
            failure = Failure(code, message, retryable=code != CONDITION_FALSE and is_passing)
        self._end(item.key, kept, failure)

    def _end(self, name: str, kept: dict[str, Any] | None, failure: Failure | None) -> None:
        """Store the end of a job under its name, and count it."""
        tally = self.tally.of(name)
        is_skip = failure is not None and failure.code in _COUNTED_ELSEWHERE
        if kept is not None:
            failure = self.complaint(name, kept)
        if self._journal.record(name, kept, failure):
            self.tally.in_flight -= 1
            self._watch.ended(name)
        if kept is not None:
            tally.succeeded += failure is None
            tally.prompt_tokens += kept["usage"]["prompt_tokens"]
            tally.completion_tokens += kept["usage"]["completion_tokens"]
            tally.cached_tokens += kept["usage"]["cached_tokens"]
        if is_skip:
            tally.skipped += 1
        elif failure is not None:
            tally.failed += 1
            tally.codes[failure.code] = tally.codes.get(failure.code, 0) + 1
            self.tally.latest = f"{failure.code}: {failure.message}"


def _may_pass(error: Exception) -> bool:
    return not isinstance(error, StoreError) or error.retryable


def _page(queue: str, batch_id: str, position: int) -> Flow[batches.Page]:
    return (yield from flows.page(queue, batch_id, position, ordered=False))


def _wait(batch_id: str) -> Flow[None]:
    yield Wait(f"batch:{batch_id}", WAIT_S)
