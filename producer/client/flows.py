"""Waiting for, streaming and collecting results, as flows (see effects.py)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from pagemill.common.backoff import Backoff
from pagemill.producer.client.effects import Emit, Flow, Read, Sleep, Wait, Watch
from pagemill.producer.client.feed_reader import FeedReader
from pagemill.producer.wire.calls import account, batches, reads, registry, transitions
from pagemill.producer.wire.calls.account import JobAccount
from pagemill.producer.wire.calls.batches import Page
from pagemill.producer.wire.calls.reads import Outcome
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.errors import (
    InvalidJob,
    JobNotFound,
    RedisUnavailable,
    ResultTimeout,
    StoreError,
)
from pagemill.producer.wire.schema.outputs import (
    BatchCounts,
    BatchInfo,
    ErrorInfo,
    JobStatus,
    Result,
    StreamEvent,
)
from pagemill.producer.wire.schema.sealing import SealedError
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.store.stub import read_payload_stub

T = TypeVar("T")


def call(effect: Call[T]) -> Flow[T]:
    """Perform one call as a flow."""
    value: T = yield effect
    return value


def outcome(queue: str, job_id: str) -> Flow[Outcome]:
    """Return the end of a job, with its result, from a store if necessary. Raises StoreError."""
    found: Outcome = yield reads.outcome(queue, job_id)
    return (yield from loaded(found))


def full_envelope(envelope: bytes) -> Flow[bytes]:
    """Return an envelope, from its store if it is a stub. Raises StoreError."""
    reference = read_payload_stub(envelope)
    if reference is None:
        return envelope
    data: bytes = yield Read(reference)
    return data


def loaded(found: Outcome) -> Flow[Outcome]:
    """Return an outcome with its result, from its store if necessary. Raises StoreError."""
    if found.stored is None:
        return found
    data: bytes = yield Read(found.stored.reference)
    return found.loaded(data)


def page(queue: str, batch_id: str, position: int, *, ordered: bool) -> Flow[Page]:
    """Return the next ended jobs of a batch. If the store has lost a result, the job has that error.

    Raises StoreError if the store does not answer, or none is configured.
    """
    found: Page = yield batches.page(queue, batch_id, position, ordered=ordered)
    for at, end in found.stored.items():
        try:
            whole_end = yield from loaded(end)
        except SealedError as error:
            problem = ErrorInfo(code=error.code, message=str(error))
            found.items[at] = found.items[at].model_copy(update={"error": problem})
        except StoreError as error:
            if error.kind != "lost":
                raise
            problem = ErrorInfo(code="payload_lost", message=str(error))
            found.items[at] = found.items[at].model_copy(update={"error": problem})
        else:
            found.items[at] = found.items[at].model_copy(update={"result": whole_end.result})
    return found


def _patiently(step: Flow[T], pace: Backoff) -> Flow[T | None]:
    """Run a step that tolerates an unreachable server: it then returns None, after a pause."""
    try:
        return (yield from step)
    except RedisUnavailable:
        if pace.is_over:
            raise
        yield Sleep(pace.next())
        return None


def statuses(queue: str, job_ids: Sequence[str]) -> Flow[list[JobStatus]]:
    """Return one status per id. Raises JobNotFound for the first unknown one, InvalidJob if an id is not text."""
    if odd := next((type(job_id).__name__ for job_id in job_ids if not isinstance(job_id, str)), None):
        raise InvalidJob(f"{keys.ID_RULE}, as text, not {odd}")
    found: list[JobStatus] = []
    while chunk := job_ids[len(found) : len(found) + reads.STATUS_CHUNK]:
        replies: list[JobStatus | None] = yield reads.statuses(queue, chunk)
        for job_id, status in zip(chunk, replies, strict=False):
            if status is None:
                raise JobNotFound.for_job(job_id)
            found.append(status)
    return found


def status(queue: str, job_id: str) -> Flow[JobStatus]:
    found = yield from statuses(queue, [job_id])
    return found[0]


def why(queue: str, job_id: str) -> Flow[JobAccount]:
    """Return a breakdown of a job's time. Raises JobNotFound."""
    found: JobAccount | None = yield account.why(queue, job_id)
    if found is None:
        raise JobNotFound.for_job(job_id)
    return found


def served_model(queue: str) -> Flow[str]:
    """Return the model that the live workers serve. Raises InvalidJob unless it is exactly one."""
    alive: list[WorkerInfo] = yield registry.workers(queue)
    served = sorted({model for worker in alive for model in worker.models})
    if len(served) == 1:
        return served[0]
    reason = (
        f"the live workers serve {', '.join(served)}" if served else f"no worker of queue {queue} is ready"
    )
    raise InvalidJob(f"the job needs a model: {reason}", param="model")


def cancel(queue: str, job_id: str) -> Flow[bool]:
    """Cancel a job. True: it has ended, or will end, because of this. False: it had ended. Raises JobNotFound."""
    replies: list[str] = yield transitions.cancel(queue, [job_id])
    if replies[0] == "missing":
        raise JobNotFound.for_job(job_id)
    return replies[0] != "done"


def wait_result(queue: str, job_id: str, timeout: float | None) -> Flow[Result]:
    """Return the job's result, or raise the error of its end. Survives reconnects."""
    pace = Backoff(jitter=0.0, timeout_s=timeout)
    while True:
        found = yield from _patiently(outcome(queue, job_id), pace)
        if found is not None:
            result = found.value()
            if result is not None:
                return result
            if pace.is_over:
                raise (yield from _late(queue, job_id, f"job {job_id} is {found.state} after {timeout} s"))
            yield Wait(job_id, pace.remaining, polled=True)


def _late(queue: str, job_id: str, message: str) -> Flow[ResultTimeout]:
    """Return the error for a job that has not ended, with the reason for its delay."""
    try:
        found = yield from status(queue, job_id)
        reason = found.error
        if found.state == "queued" and reason is not None and found.leader is None:
            alive: list[WorkerInfo] = yield registry.workers(queue)
            served = sorted({model for worker in alive for model in worker.models})
            others = (
                f"those alive serve {', '.join(served)}"
                if served
                else f"queue {queue} has none that is ready"
            )
            reason = f"{reason}; {others}"
    except (RedisUnavailable, JobNotFound):
        reason = None
    return ResultTimeout(
        f"{message}: {reason}; it continues" if reason else f"{message}; it continues", reason
    )


def batch_counts(queue: str, batch_id: str) -> Flow[BatchCounts]:
    """Return the batch's counts. Raises JobNotFound for an unknown batch."""
    counts: BatchCounts | None = yield batches.counts(queue, batch_id)
    if counts is None:
        raise JobNotFound(f"no batch {batch_id}: never submitted, or removed after its time")
    return counts


def batch_infos(queue: str) -> Flow[None]:
    """Emit a BatchInfo for each batch of the queue, in pages; one whose order changes meanwhile may be missed."""
    start = 0
    while True:
        found: list[BatchInfo] = yield batches.listed(queue, start, batches.LIST_BATCHES)
        for info in found:
            yield Emit(info)
        start += len(found)
        if len(found) < batches.LIST_BATCHES:
            return


def wait_batch(queue: str, batch_id: str, timeout: float | None) -> Flow[BatchCounts]:
    """Return the counts once every job has ended."""
    pace = Backoff(jitter=0.0, timeout_s=timeout)
    while True:
        counts = yield from _patiently(batch_counts(queue, batch_id), pace)
        if counts is None:
            continue
        if counts.done:
            return counts
        if pace.is_over:
            raise ResultTimeout(
                f"{counts.ended} of {counts.total} jobs of batch {batch_id} have ended; it continues"
            )
        yield Wait(f"batch:{batch_id}", pace.next())


def batch_results(
    queue: str, batch_id: str, *, ordered: bool, after: str | None, timeout: float | None = None
) -> Flow[None]:
    """Emit a BatchItem for each ended job, from the cursor on, and return when all jobs have ended.

    After `timeout` seconds it emits the available items, and raises ResultTimeout instead of waiting for more.
    """
    position = 0
    if after is not None:
        letter, position = batches.split_cursor(after)
        if letter != ("s" if ordered else "e"):
            raise InvalidJob("this cursor is of the other order: give results() the same `ordered` as before")
    pace = Backoff(jitter=0.0, timeout_s=timeout)
    while True:
        counts = yield from _patiently(batch_counts(queue, batch_id), pace)
        if counts is None:
            continue
        some = yield from _patiently(page(queue, batch_id, position, ordered=ordered), pace)
        if some is None:
            continue
        for item in some.items:
            yield Emit(item)
        if some.position > position:
            position = some.position
            pace.reset()
        elif position >= (counts.total if ordered else counts.ended) and counts.done:
            return
        elif pace.is_over:
            raise ResultTimeout(
                f"{counts.ended} of {counts.total} jobs of batch {batch_id} have ended after {timeout} s; it continues"
            )
        else:
            yield Wait(f"batch:{batch_id}", pace.next())


def ack_batch(queue: str, batch_id: str, cursor: str) -> Flow[int]:
    """Free the jobs up to the cursor; returns their number."""
    freed, start, end = 0, 0, batches.split_cursor(cursor)[1]
    count: int
    reached: int
    while start < end:
        count, reached = yield batches.ack(queue, batch_id, cursor, start)
        if reached == start:
            break
        freed, start = freed + count, reached
    return freed


def cancel_batch(queue: str, batch_id: str) -> Flow[int]:
    """Stop every job that has not ended; returns their number."""
    stopped, start = 0, 0
    count: int
    seen: int
    while True:
        count, seen = yield batches.cancel(queue, batch_id, start)
        stopped, start = stopped + count, start + seen
        if seen == 0:
            return stopped


def stream(queue: str, job_id: str) -> Flow[None]:
    """Emit StreamEvents until the job has ended. Raises JobNotFound and, if its result was removed, ResultExpired."""
    topic = f"feed:{job_id}"
    yield Watch(topic)
    reader = FeedReader(job_id)
    pace = Backoff(jitter=0.0)
    while True:
        feed = yield from _patiently(call(reads.feed(queue, job_id, reader.epoch, reader.position)), pace)
        if feed is None:
            continue
        if feed.state is None:
            raise JobNotFound.for_job(job_id)
        if feed.stored is not None:
            data: bytes = yield Read(feed.stored.reference)
            feed = replace(feed, result=feed.stored.parse(data))
        for event in reader.read(feed):
            yield Emit(event)
        if feed.is_cut:
            continue
        if feed.end == "succeeded" and feed.result is None:
            raise reads.result_expired(job_id)
        if feed.end is not None:
            yield Emit(StreamEvent(type="end", attempt=feed.attempt, state=feed.end))
            return
        yield Wait(topic, pace.next())
