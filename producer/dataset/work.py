"""The loop of a run: submit missing jobs, collect ended ones, with at most a window in flight."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from pagemill.producer.client import flows
from pagemill.producer.client.effects import Flow, Wait
from pagemill.producer.client.sync import Producer
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.wire.calls import batches
from pagemill.producer.wire.schema.errors import JobNotFound, QueueFull, RedisUnavailable, StoreError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import BatchItem

WINDOW = 20_000
CHUNK = 1_000
WAIT_S = 0.5
RUNS_PRIORITY: Final = "low"
RUNS_TENANT: Final = "dataset-runs"
"""Where jobs wait that say nothing of it: behind those that somebody waits for, in a lane of their own. A producer
with a tenant keeps it."""
DEFAULT_TENANT: Final = "default"
PATIENCE_S = 300.0
"""Seconds that a server may be away in the middle of a run."""
LOST_AFTER_S = 10.0
"""Seconds without news after which the server is asked whether it still knows the jobs under way."""


CONDITION_FALSE: Final = "condition_false"
PARENT_FAILED: Final = "parent_failed"
"""The codes of jobs that ended by how another one ended, which has been counted."""
_NOT_KEPT: Any = {"id": True, "metadata": True, "fingerprint": True, "outputs": {"__all__": {"token_ids"}}}


class TooManyErrors(Exception):
    """The run has more failures than allowed; the message says which."""


@dataclass(slots=True)
class Tally:
    """The run so far, as the progress bar shows it. `latest` is the last failure's message.

    `settled`: rows without a job in this start: done in an earlier one, served by an equal row's job, or bad.
    """

    settled: int = 0
    submitted: int = 0
    in_flight: int = 0
    succeeded: int = 0
    failed: int = 0
    skipped: int = 0
    """Jobs that were not to run, by how an earlier step of their row ended."""
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    latest: str = ""
    codes: dict[str, int] = field(default_factory=dict)
    stages: dict[str, Tally] = field(default_factory=dict)
    """The later stages of a cascade by their models, or the later steps of a recipe: jobs, not rows. Only `in_flight`
    is of all together."""

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
    """Return the key of the same work by the model of a cascade's later stage."""
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
    ) -> None:
        self.tally = Tally()
        self.complaint: Callable[[str, Mapping[str, Any]], Failure | None] = lambda key, kept: None
        """Tells why a result, by its work's key and as the journal keeps it, counts as failed."""
        self._producer = producer
        self._journal = journal
        self._window = window
        self._max_errors = max_errors
        self._on_news = on_news
        self._batch_id = ""
        self._position = 0
        self._reached = time.monotonic()
        self._following: list[Iterator[Work | None]] = []
        own = producer.tenant if producer.tenant != DEFAULT_TENANT else RUNS_TENANT
        self._place = {"priority": RUNS_PRIORITY, "tenant": own}

    def run(
        self,
        works: Callable[[], Iterator[Work | None]],
        followers: Sequence[Follower] = (),
        *,
        collect: bool = True,
    ) -> None:
        """Do everything `works` yields (None: a row without a job), and then `followers`, as outcomes come in.

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
            self._new_batch()

    def cancel(self) -> int:
        """Cancel the jobs that this run, or an earlier one of the same journal, has under way."""
        self._attach()
        try:
            return self._producer.batch(self._batch_id).cancel()
        except JobNotFound:
            return 0

    def _attach(self) -> None:
        """Resume the batch that the journal names, if the server still knows it."""
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
        with self._journal.transaction():
            self._journal.set_facts(batch_id=self._batch_id, position="0")

    def _items(self, works: Iterator[Work | None], *, is_first: bool) -> Iterator[Job]:
        for work in works:
            item = None if work is None else self._item(work)
            if item is not None:
                yield item
            elif is_first:
                (self.tally if work is None else self.tally.of(work.key)).settled += 1

    def _submit(self, items: Iterator[Job], *, collect: bool) -> None:
        while chunk := list(itertools.islice(items, CHUNK)):
            self._send(chunk)
            for job in chunk:
                self.tally.of(job.key or "").submitted += 1
            if collect:
                self._collect()
                while self.tally.in_flight > self._window:
                    self._collect(wait=True)
                self._follow()
            self._on_news(self.tally)

    def _follow(self) -> int:
        """Submit the work that has come to be known, as far as the window allows; returns the number of jobs."""
        count = 0
        for works in reversed(self._following):  # what is nearest to its end first
            known = itertools.takewhile(lambda work: work is not None, works)
            jobs = (
                job for job in (self._item(work) for work in known if work is not None) if job is not None
            )
            while self.tally.in_flight <= self._window and (chunk := list(itertools.islice(jobs, CHUNK))):
                self._send(chunk)
                self.tally.of(chunk[0].key or "").submitted += len(chunk)
                count += len(chunk)
        return count

    def _send(self, chunk: list[Job]) -> None:
        """Submit a chunk, even through a restart of the server or a full queue: the names make a retry idempotent."""
        give_up = time.monotonic() + PATIENCE_S
        while True:
            try:
                self._producer.submit_many(chunk, batch_id=self._batch_id, on_full="raise")
            except QueueFull:
                # What has ended is collected meanwhile: the run's own results may be what fills the server.
                self._collect()
                time.sleep(WAIT_S)
            except (RedisUnavailable, StoreError) as error:
                if time.monotonic() > give_up or not _may_pass(error):
                    raise
                time.sleep(WAIT_S)
            else:
                self.tally.in_flight += len(chunk)
                return

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
                if self._is_lost():
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
        """Collect the jobs that have ended; returns their number."""
        collected = 0
        while True:
            try:
                page = self._producer.run_flow(_page(self._producer.queue, self._batch_id, self._position))
            except (RedisUnavailable, StoreError) as error:
                if time.monotonic() - self._reached > PATIENCE_S or not _may_pass(error):
                    raise
                time.sleep(WAIT_S)
                return collected
            self._reached = time.monotonic()
            if page.position > self._position:
                self._keep(page)
                collected += len(page.items)
                continue
            if wait and not collected:
                self._producer.run_flow(_wait(self._batch_id))
            self._on_news(self.tally)
            return collected

    def _keep(self, page: batches.Page) -> None:
        with self._journal.transaction():
            for item in page.items:
                self._record(item)
            self._journal.set_facts(position=str(page.position))
        self._position = page.position
        with contextlib.suppress(RedisUnavailable):  # acknowledged again with the next page
            self._producer.batch(self._batch_id).ack(f"e{page.position}")
        self._on_news(self.tally)
        if self._max_errors is not None and self.tally.all_failed > self._max_errors:
            raise TooManyErrors(
                f"{self.tally.all_failed} rows have failed, more than --max-errors {self._max_errors}; "
                f"the last one: {self.tally.latest}"
            )

    def _record(self, item: BatchItem) -> None:
        tally, result = self.tally.of(item.key), item.result
        failure, is_skip = None, False
        if result is None:
            error = item.error
            code, message = (error.code, error.message) if error else (item.state, item.state)
            is_skip = code in (CONDITION_FALSE, PARENT_FAILED)
            failure = Failure(
                code,
                message,
                retryable=code != CONDITION_FALSE
                and (item.state != "failed" or bool(error and error.retryable)),
            )
        kept = None
        if result is not None:
            # Without token ids: they are unused, and the largest part.
            kept = result.model_dump(exclude=_NOT_KEPT) | {"created": int(time.time())}
            failure = self.complaint(item.key, kept)
        if self._journal.record(item.key, kept, failure):
            self.tally.in_flight -= 1
        if result is not None:
            tally.succeeded += failure is None
            tally.prompt_tokens += result.usage.prompt_tokens
            tally.completion_tokens += result.usage.completion_tokens
            tally.cached_tokens += result.usage.cached_tokens
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
