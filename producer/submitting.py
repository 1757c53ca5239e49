"""Submitting jobs as flows: minting ids and seeds, cutting chunks, being refused."""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal, TypeAlias

from producer.effects import Begin, Finish, Flow, Sleep, Sync
from producer.wire import keys, transitions
from producer.wire.errors import IdempotencyConflict, InvalidJob, QueueFull, RedisUnavailable
from producer.wire.outputs import ErrorInfo
from producer.wire.protocol import MAX_METADATA_BYTES, Job
from producer.wire.scripts import Call
from producer.wire.signing import Keys
from producer.wire.transitions import Submission, SubmitReply

JobLike: TypeAlias = Job | Mapping[str, Any]
OnInvalid: TypeAlias = Literal["record", "raise"]
OnFull: TypeAlias = Literal["block", "raise"]

CHUNK_JOBS = 250
CHUNK_BYTES = 1 << 20
FIRST_PAUSE_S = 0.05
LAST_PAUSE_S = 1.0
RETRY_PAUSES_S = (0.1, 0.3, 0.6)
"""Between tries to reach a server that is away."""


def new_job_id() -> str:
    return secrets.token_hex(12)


def new_batch_id() -> str:
    return secrets.token_hex(10)


def item_id(batch_id: str, key: str) -> str:
    """The id of a batch's item. It follows from batch and key, so a second submit meets the first."""
    return hashlib.blake2b(f"{batch_id}\0{key}".encode(), digest_size=12).hexdigest()


def check_id(name: str) -> str:
    if not keys.ID_PATTERN.fullmatch(name):
        raise InvalidJob("an id is 1 to 64 of the characters A-Z a-z 0-9 . _ -")
    return name


def build_job(job: JobLike | None, fields: Mapping[str, Any], tenant: str) -> Job:
    """A job from a Job or a mapping, with `fields` on top. Raises InvalidJob."""
    if isinstance(job, Job) and not fields and "tenant" in job.model_fields_set:
        return job
    given: dict[str, Any] = {"tenant": tenant}
    if isinstance(job, dict):
        given |= job
    elif isinstance(job, Job):
        given |= {name: getattr(job, name) for name in job.model_fields_set}
    elif isinstance(job, Mapping):
        given |= dict(job)
    elif job is not None:
        raise InvalidJob(f"a job is a Job or a mapping of its fields, not {type(job).__name__}")
    given |= fields
    return Job.parse(given)


def seed_of(job_id: str) -> int:
    """The seed of a job that brings none, so that every execution of it draws the same noise.

    It follows from the id, so that submitting an id again submits the same job.
    """
    digest = hashlib.blake2b(job_id.encode(), digest_size=8, person=b"pagemill-seed").digest()
    return int.from_bytes(digest, "big") >> 1


def _send(call: Call[list[SubmitReply]]) -> Flow[list[SubmitReply]]:
    """Send a submit, again after short pauses if the server is away: the ids make a second one harmless."""
    for pause in RETRY_PAUSES_S:
        try:
            replies: list[SubmitReply] = yield call
        except RedisUnavailable:
            yield Sleep(pause)
        else:
            return replies
    replies = yield call
    return replies


def signed(item: Submission, queue: str, tenant: str, hmac_keys: Keys) -> Submission:
    """The submission with its payload signed, if there is a key."""
    if not hmac_keys:
        return item
    payload = hmac_keys.sign_payload(item.payload, queue=queue, job_id=item.job_id, tenant=tenant)
    return replace(item, payload=payload)


def submit(queue: str, job: Job, job_id: str, hmac_keys: Keys) -> Flow[str]:
    """Submit one job; returns the id it goes by, another's if the idempotency key was known."""
    if job.key is not None:
        raise InvalidJob("key names an item of a batch; use submit_many, or metadata")
    digest = None if job.idempotency_key is None else job.digest()
    submission = transitions.prepare(job, job_id, digest=digest, seed=seed_of(job_id))
    submission = signed(submission, queue, job.tenant, hmac_keys)
    try:
        replies = yield from _send(transitions.submit(queue, [submission]))
        yield Sync()
    except RedisUnavailable as error:
        raise RedisUnavailable(f"{error}; the job may have arrived or not", job_id) from error
    reply = replies[0]
    if reply.status == "full":
        raise QueueFull(f"queue {queue} takes no more jobs now")
    if reply.status == "conflict":
        raise IdempotencyConflict(
            f"the idempotency key belongs to job {reply.job_id}, with another payload", reply.job_id
        )
    return reply.job_id


def submit_many(queue: str, batch_id: str, submissions: Iterator[Submission], on_full: OnFull) -> Flow[None]:
    """Submit an iterable of jobs chunk by chunk; returns when all are accepted.

    While the server stores a chunk, the next one is prepared.
    """
    chunks = cut_chunks(submissions)
    sent: list[Submission] | None = None
    pending: Any = None
    try:
        for chunk in chunks:
            if sent is not None:
                settled, sent = sent, None
                yield from _settle(queue, batch_id, settled, pending, on_full)
            pending = yield Begin(transitions.submit(queue, chunk, batch_id=batch_id))
            sent = chunk
    except Exception:
        # A bad row, or whatever the caller's iterable raised: what came before it stays submitted.
        if sent is not None:
            yield from _settle(queue, batch_id, sent, pending, on_full)
        raise
    if sent is not None:
        yield from _settle(queue, batch_id, sent, pending, on_full)
    yield Sync()  # once: the server's file is in order, the last chunk is behind all others


def _settle(queue: str, batch_id: str, chunk: list[Submission], pending: Any, on_full: OnFull) -> Flow[None]:
    """See a chunk that was sent through: all of it is accepted in the end."""
    pause = FIRST_PAUSE_S
    reply = _received(pending)
    while True:
        left = chunk
        try:
            replies = yield from reply
        except RedisUnavailable:
            replies = yield from _send(transitions.submit(queue, chunk, batch_id=batch_id))
        except QueueFull:
            # Out of memory: nothing of the chunk was stored.
            if on_full == "raise":
                raise
            replies = []
        if replies or not chunk:
            left = [item for item, answer in zip(chunk, replies, strict=True) if answer.status == "full"]
            if not left:
                return
        if on_full == "raise":
            raise QueueFull(f"queue {queue} takes no more jobs now")
        chunk = left
        yield Sleep(pause)
        pause = min(LAST_PAUSE_S, 2 * pause)
        reply = _send(transitions.submit(queue, chunk, batch_id=batch_id))


def _received(pending: Any) -> Flow[list[SubmitReply]]:
    replies: list[SubmitReply] = yield Finish(pending)
    return replies


def cut_chunks(submissions: Iterator[Submission]) -> Iterator[list[Submission]]:
    """Chunks of at most 250 jobs and 1 MiB, unless one job is larger; without any job, one empty chunk."""
    chunk: list[Submission] = []
    size, chunks = 0, 0
    for item in submissions:
        grown = size + len(item.header) + len(item.payload)
        if chunk and (len(chunk) == CHUNK_JOBS or grown > CHUNK_BYTES):
            yield chunk
            chunks += 1
            chunk, grown = [], grown - size
        chunk.append(item)
        size = grown
    if chunk or not chunks:
        yield chunk


def prepare_items(
    jobs: Iterable[JobLike],
    batch_id: str,
    *,
    queue: str,
    tenant: str,
    hmac_keys: Keys,
    on_invalid: OnInvalid,
    by_content: bool,
) -> Iterator[Submission]:
    """Submissions for the items of a batch, made as they are asked for.

    An item without a key gets its position for one; or, in a batch that may be submitted again
    (`by_content`), the hash of its work and how many equal items came before it.
    """
    seen: dict[str, int] = {}
    for position, given in enumerate(jobs):
        try:
            job = build_job(given, {}, tenant)
            if job.idempotency_key is not None:
                message = "idempotency_key is for single jobs; in a batch, `key` does its work"
                raise InvalidJob(message, "unsupported_feature")
            key = job.key or (_content_key(job, seen) if by_content else str(position))
            job_id = item_id(batch_id, key)
            item = transitions.prepare(job, job_id, key=key, seed=seed_of(job_id))
            yield signed(item, queue, job.tenant, hmac_keys)
        except InvalidJob as error:
            if on_invalid == "raise":
                raise InvalidJob(f"item {position}: {error}", error.code) from None
            yield _record_invalid(given, position, batch_id, error)


def _content_key(job: Job, seen: dict[str, int]) -> str:
    digest = job.digest()
    seen[digest] = seen.get(digest, 0) + 1
    return f"{digest}-{seen[digest]}"


def _record_invalid(given: object, position: int, batch_id: str, error: InvalidJob) -> Submission:
    """A row that is no job, as the failed item it will be. Its key and metadata are kept if they can be."""
    fields: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    key, metadata = fields.get("key"), fields.get("metadata")
    if not (isinstance(key, str) and 0 < len(key) <= 255 and key.isprintable()):
        key = f"invalid-{position}"
    try:
        text = json.dumps(metadata, allow_nan=False) if isinstance(metadata, dict) else None
    except (ValueError, TypeError, RecursionError):
        text = None
    header = {
        "id": item_id(batch_id, key),
        "key": key,
        "lane": keys.lane(1, "normal", "default", "-"),
        "cost": 0,
        "invalid": ErrorInfo(code=error.code, message=str(error)).model_dump_json(),
    }
    if text is not None and len(text) <= MAX_METADATA_BYTES:
        header["metadata"] = text
    return Submission(str(header["id"]), json.dumps(header).encode(), b"")
