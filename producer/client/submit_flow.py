"""Submission as flows: cutting chunks, handling rejections, waiting for capacity."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, Literal, TypeAlias, TypeVar

from pagemill.common.backoff import Backoff
from pagemill.producer.client.effects import Begin, Finish, Flow, Sleep, Sync, Write
from pagemill.producer.client.preparer import IDEMPOTENCY_CONFLICT, OnInvalid, record_invalid
from pagemill.producer.wire.calls import stored, submissions
from pagemill.producer.wire.calls.estimates import EstimateInputs, JobDemand, estimate_inputs, estimated_end
from pagemill.producer.wire.calls.limits import QueueLimits, limits
from pagemill.producer.wire.calls.metering.quotas import TenantQuotas
from pagemill.producer.wire.calls.registry import StatsPage, stats_page
from pagemill.producer.wire.calls.submissions import Submission, SubmitReply, SubmitStatus
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.completion_estimate import CompletionEstimate
from pagemill.producer.wire.schema.errors import (
    DeadlineUnreachable,
    IdempotencyConflict,
    InvalidJob,
    PagemillError,
    QueueFull,
    RedisUnavailable,
)
from pagemill.producer.wire.server.scripts import Call

T = TypeVar("T")

OnFull: TypeAlias = Literal["block", "raise"]
OnLate: TypeAlias = Literal["flag", "refuse"]

FULL: frozenset[SubmitStatus] = frozenset({"full", "memory", "purging"})
"""Rejected for now: there may be capacity later."""
CHUNK_JOBS = 250
CHUNK_BYTES = 1 << 20
OUT_OF_MEMORY = (
    "queue {queue} accepts no more jobs: the Redis server is near its maxmemory, "
    "and what is left is for running jobs"
)
RETRY_PAUSES_S = (0.1, 0.3, 0.6)
"""Seconds between attempts to reach an unavailable server."""


def upload(queue: str, items: Sequence[Submission]) -> Flow[None]:
    """Write the parts of these jobs that belong into the store. Raises StoreError."""
    uploads = [item.upload for item in items if item.upload is not None]
    if uploads:
        # Announced first, so that files without a job are deleted again.
        yield from send(stored.announce(queue, [each.uri for each in uploads]))
        yield Write(uploads)


def send(call: Call[T]) -> Flow[T]:
    """Submit, with retries after short pauses if the server is unavailable: the ids make it idempotent."""
    for pause in RETRY_PAUSES_S:
        try:
            replies: T = yield call
        except RedisUnavailable:
            yield Sleep(pause)
        else:
            return replies
    replies = yield call
    return replies


def submit(queue: str, item: Submission, on_full: OnFull) -> Flow[SubmitReply]:
    """Submit one job; the reply has its id, or that of the earlier job with its idempotency key."""
    backoff = Backoff(jitter=0.0)
    yield from upload(queue, [item])
    while True:
        try:
            replies = yield from send(submissions.submit(queue, [item]))
            yield Sync()
        except RedisUnavailable as error:
            raise RedisUnavailable(f"{error}; the job may have arrived or not", item.job_id) from error
        except QueueFull:
            if on_full == "raise":
                raise
        else:
            reply = replies[0]
            if reply.status not in FULL:
                break
            if on_full == "raise":
                raise (yield from _full(queue, item, reply))
        yield Sleep(backoff.next())
    if reply.status == "conflict":
        raise IdempotencyConflict(
            f"the idempotency key belongs to job {reply.job_id}, with another payload", reply.job_id
        )
    if refused := _refusal(queue, item, reply):
        raise refused
    return reply


def submit_with_estimate(
    queue: str, item: Submission, on_full: OnFull, on_late: OnLate | None
) -> Flow[tuple[str, CompletionEstimate | None, TenantQuotas | None]]:
    """Submit as `submit` does, and also return the job's estimate and its tenant's remaining quotas.

    `on_late`: the treatment of a job that would miss its deadline; None: no estimate.

    There is none for an earlier job with its idempotency key. Raises DeadlineUnreachable.
    """
    estimate = None
    if on_late is not None:
        seen: EstimateInputs = yield estimate_inputs(queue, json.loads(item.header)["lane"])
        item, estimate = with_estimate(item, seen)
        if on_late == "refuse":
            refuse_late(estimate)
    reply = yield from submit(queue, item, on_full)
    return reply.job_id, estimate if reply.job_id == item.job_id else None, reply.left


def with_estimate(item: Submission, seen: EstimateInputs) -> tuple[Submission, CompletionEstimate]:
    """Return the job with the estimate in its header, so that it can be scored, and the estimate."""
    asked = JobDemand.from_header(item.header, seen.now)
    # The end of the jobs that it waits for is unknown.
    found = None if item.is_linked else estimated_end(seen, asked)
    if found is None:
        return item, CompletionEstimate(deadline=None if asked.deadline is None else asked.deadline / 1000)
    header = item.header[:-1] + f',"estimate":"{found}"}}'.encode()
    return replace(item, header=header), found.completion(asked.deadline)


def refuse_late(estimate: CompletionEstimate) -> None:
    """Raise DeadlineUnreachable if the job will probably expire."""
    if estimate.misses_deadline:
        late_s = (estimate.p50 or 0.0) - (estimate.deadline or 0.0)
        message = f"the job would probably end {late_s:.1f} s after its deadline; it was not submitted"
        raise DeadlineUnreachable(message, estimate)


def submit_many(
    queue: str, batch_id: str, submissions: Iterator[Submission], on_full: OnFull, on_invalid: OnInvalid
) -> Flow[None]:
    """Submit an iterable of jobs chunk by chunk; returns when all are accepted.

    While the server stores a chunk, the next one is prepared.
    """
    batch = _Batch(queue, batch_id, on_full, on_invalid)
    sent: list[Submission] | None = None
    pending: Any = None
    chunks = cut_chunks(submissions)
    while True:
        try:
            chunk = next(chunks, None)
        except Exception:
            # An invalid row, or an error of the caller's iterable: earlier rows stay submitted.
            if sent is not None:
                yield from batch.complete(sent, pending)
            raise
        if sent is not None:
            yield from batch.complete(sent, pending)
        if chunk is None:
            break
        yield from upload(queue, chunk)
        pending = yield Begin(batch.call(chunk))
        sent = chunk
    yield Sync()  # once suffices: the server's file is sequential, and the last chunk comes last


class _Batch:
    """One bulk submission: sends chunks and handles the replies."""

    def __init__(self, queue: str, batch_id: str, on_full: OnFull, on_invalid: OnInvalid) -> None:
        self._queue = queue
        self._batch_id = batch_id
        self._on_full = on_full
        self._on_invalid = on_invalid

    def call(self, chunk: list[Submission]) -> Call[list[SubmitReply]]:
        return submissions.submit(self._queue, chunk, batch_id=self._batch_id)

    def complete(self, chunk: list[Submission], pending: Any) -> Flow[None]:
        """Wait until all of a chunk that was sent is accepted, resending as needed."""
        backoff = Backoff(jitter=0.0)
        reply = _received(pending)
        while True:
            try:
                replies = yield from _repeated_if_lost(reply, self.call(chunk))
            except QueueFull:
                # Out of memory: no job of the chunk was stored.
                if self._on_full == "raise":
                    raise
            else:
                chunk, refused = self._to_resend(chunk, replies)
                if not chunk:
                    return
                if refused is None:
                    reply = send(self.call(chunk))
                    continue
                if self._on_full == "raise":
                    raise (yield from _full(self._queue, chunk[0], refused))
            yield Sleep(backoff.next())
            reply = send(self.call(chunk))

    def _to_resend(
        self, chunk: list[Submission], replies: list[SubmitReply]
    ) -> tuple[list[Submission], SubmitReply | None]:
        """Return the items to send again, and a reply that rejects one for now.

        Raises InvalidJob and IdempotencyConflict.
        """
        left, refused = [], None
        for item, answer in zip(chunk, replies, strict=True):
            if answer.status == "created":
                continue
            if answer.status in FULL:
                left.append(item)
                refused = answer
            elif answer.status == "again":
                left.append(item)
            elif error := _refusal(self._queue, item, answer):
                if self._on_invalid == "raise":
                    is_conflict = answer.status == "conflict"
                    raise IdempotencyConflict(str(error), answer.job_id) if is_conflict else error
                left.append(record_invalid(item, error))
        return left, refused


def _full(queue: str, item: Submission, reply: SubmitReply) -> Flow[QueueFull]:
    """Return the error for a full queue, with its counts if the server still returns them."""
    _, priority, tenant, model = keys.split_lane(json.loads(item.header)["lane"])
    lane = (priority, tenant, model)
    if reply.status == "memory":
        return QueueFull(OUT_OF_MEMORY.format(queue=queue), queue=queue, lane=lane, reason="memory")
    if reply.status == "purging":
        message = f"queue {queue} accepts no jobs of tenant {tenant} while its jobs are being removed"
        return QueueFull(message, queue=queue, lane=lane)
    try:
        found: QueueLimits = yield limits(queue)
        page: StatsPage = yield stats_page(queue)
    except PagemillError:
        return QueueFull(f"queue {queue} accepts no more jobs", queue=queue, lane=lane)
    depth = page.totals.counts.get("queued", 0) + page.totals.counts.get("delayed", 0)
    limit = found.jobs or submissions.DEFAULT_QUEUE_LIMIT
    message = f"queue {queue} accepts no more jobs: {depth:,} wait, the limit is {limit:,}"
    return QueueFull(message, queue=queue, limit=limit, depth=depth, lane=lane)


def _refusal(queue: str, item: Submission, reply: SubmitReply) -> InvalidJob | None:
    """Return the error of a job that the queue rejects permanently; otherwise None."""
    other = reply.job_id
    match reply.status:
        case "conflict":
            key = json.loads(item.header).get("key", "")
            message = f"the key {key!r} belongs to job {other} of the batch, with another payload"
            return InvalidJob(message, IDEMPOTENCY_CONFLICT, "key")
        case "too_large":
            payload = item.payload if item.upload is None else item.upload.data
            message = f"the job has {len(payload)} bytes, more than queue {queue} takes"
            return InvalidJob(message, "payload_too_large")
        case "unknown":
            message = (
                f"it is to wait for job {other}, and the tenant has no such job in queue {queue}: never submitted, "
                "only later, or its record has been removed"
            )
            return InvalidJob(message, "unknown_parent", "after")
        case "cycle":
            message = f"it is to wait for job {other}, which waits for it"
            return InvalidJob(message, "dependency_cycle", "after")
        case "crowded":
            message = f"it is to wait for job {other}, for which too many jobs wait"
            return InvalidJob(message, "too_many_children", "after")
    return None


def _repeated_if_lost(
    reply: Flow[list[SubmitReply]], call: Call[list[SubmitReply]]
) -> Flow[list[SubmitReply]]:
    try:
        return (yield from reply)
    except RedisUnavailable:
        return (yield from send(call))


def _received(pending: Any) -> Flow[list[SubmitReply]]:
    replies: list[SubmitReply] = yield Finish(pending)
    return replies


def cut_chunks(submissions: Iterator[Submission]) -> Iterator[list[Submission]]:
    """Yield chunks of up to 250 jobs and 1 MiB, unless one job is larger; without jobs, one empty chunk."""
    chunk: list[Submission] = []
    size, chunks = 0, 0
    for item in submissions:
        grown = size + len(item.header) + len(item.payload)
        grown += len(item.upload.data) if item.upload is not None else 0
        if chunk and (len(chunk) == CHUNK_JOBS or grown > CHUNK_BYTES):
            yield chunk
            chunks += 1
            chunk, grown = [], grown - size
        chunk.append(item)
        size = grown
    if chunk or not chunks:
        yield chunk
