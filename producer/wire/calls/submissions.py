"""Submitting jobs: the content of a submission, its preparation, and the call that enqueues it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from pagemill.producer.wire.calls.metering.quotas import TenantQuotas, read_lines
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.server.scripts import Call
from pagemill.producer.wire.store.stub import Upload

DEFAULT_QUEUE_LIMIT = 1_000_000
"""Jobs that may be queued or delayed, unless the queue's own limit is set."""
_TIMES = frozenset({"delay", "ttl", "run_at", "deadline"})
_HEADER_FIELDS = _TIMES | {"max_attempts", "n"}

SubmitStatus = Literal[
    "created",
    "exists",
    "same",
    "conflict",
    "full",
    "memory",
    "too_large",
    "gone",
    "unknown",
    "cycle",
    "crowded",
    "again",
    "purging",
]


@dataclass(slots=True)  # not frozen: that would triple the creation time
class Submission:
    """One job to submit: its id, the header that the script reads, and the envelope that it stores."""

    job_id: str
    header: bytes
    payload: bytes
    is_linked: bool = False
    """True if it waits for other jobs."""
    upload: Upload | None = None
    """The file to write to a store first, if the payload is a stub."""

    def under(self, api_key: str | None) -> Submission:
        """Return a copy that the ledger counts under the name of the gateway's API key."""
        if api_key is None:
            return self
        return replace(self, header=self.header[:-1] + f',"api_key":"{api_key}"}}'.encode())

    def listed(self) -> Submission:
        """Return a copy that is included in the list of its tenant's chats."""
        return replace(self, header=self.header[:-1] + b',"listed":1}')

    def uncounted(self) -> Submission:
        """Return a copy that neither ledger nor quotas count, for an operator's work on a tenant's data."""
        return replace(self, header=self.header[:-1] + b',"uncounted":1}')


@dataclass(slots=True)
class SubmitReply:
    """The outcome of one submission.

    created; exists: this id was submitted before; same or conflict: the idempotency key, or the key in the batch,
    belongs to `job_id`, with an equal or a different payload. Not stored: full, the queue's limit is reached; memory,
    the server has no free memory; purging, the tenant's jobs are being removed; too_large, beyond its limit of bytes
    per payload; gone, the job to replay is not a dead letter. `same` also means that a dead job was already replayed,
    as `job_id`. Jobs that wait for `job_id` are not stored either if it is: unknown, not a job of the tenant; cycle,
    waiting for this one; crowded, awaited by too many jobs; again, in the same call and not stored.
    """

    status: SubmitStatus
    job_id: str
    left: TenantQuotas | None = None
    """The remaining quotas of the job's tenant; None if it has none."""


def prepare(
    job: Job,
    job_id: str,
    *,
    key: str | None = None,
    seed: int | None = None,
    digest: str | None = None,
    work: str | None = None,
    replay_of: str | None = None,
    relay: str | None = None,
    waiter: str | None = None,
    max_bytes: int = MAX_PAYLOAD_BYTES,
) -> Submission:
    """Prepare a job for `submit`; `key`, `seed` and `digest` apply if the job does not set them.

    `work`: a hash of its id and its work; another one under the same id is a conflict. `replay_of` is the dead job that
    it replays, `relay` the relay to notify of its end through an outbox, `waiter` (up to 32 letters and digits) a
    client that waits for it and may end it by leaving (waiters.py). Raises InvalidJob if the job is too large.
    """
    # Formatted manually: a JSON encoder would take a fifth of a submission's time. No value needs escaping.
    header = f'"id":"{job_id}","lane":"{lane_of(job)}","cost":{job.cost_tokens()}'
    affinity = job.affinity()
    if affinity is not None:
        header += f',"affinity":"{affinity}"'
    if work is not None:
        header += f',"work":"{work}"'
    options = header_options(job)
    if job.key or key:
        options["key"] = job.key or key or ""
    if job.idempotency_key is not None or job.dedupe:
        digest = digest or job.digest()
        options["digest"] = digest
    if job.dedupe:
        options["twin"] = f"{job.tenant}:{digest}"
    if replay_of is not None:
        options["replay_of"] = replay_of
    if relay is not None:
        options["relay"] = relay
    if waiter is not None:
        options["waiters"] = waiter
    is_linked = job.after is not None and replay_of is None
    if is_linked:
        options |= job.dependency_options(text for _, text in job.templates())
    if options:
        header += "," + json.dumps(options)[1:-1]
    payload = job.to_payload(key=key, seed=seed, max_bytes=max_bytes)
    return Submission(job_id, f"{{{header}}}".encode(), payload, is_linked)


def lane_of(job: Job) -> str:
    model = keys.lane_model(job.model, job.adapter, job.revision)
    return keys.lane(job.needs, job.priority, job.tenant, model)


def header_options(job: Job) -> dict[str, str | int]:
    """Return the header's fields beyond id, lane and cost; most jobs have none."""
    given = job.model_fields_set & _HEADER_FIELDS
    options: dict[str, str | int] = {}
    for name in given & _TIMES:
        seconds = getattr(job, name)
        if seconds is not None:
            options[name] = round(seconds * 1000)
    if "max_attempts" in given:
        options["max_attempts"] = job.max_attempts
    if "n" in given and job.n != 1:
        options["n"] = job.n
    if job.is_ranked or job.width != job.n:
        options["width"] = job.width
    if job.stream:
        options["stream"] = 1
    if job.keep_input:
        options["keep"] = 1
    if job.webhook is not None:
        options["webhook"] = job.webhook
    if job.idempotency_key is not None:
        options["idem"] = f"{job.tenant}:{job.idempotency_key}"
    if job.metadata is not None:
        options["metadata"] = json.dumps(job.metadata, ensure_ascii=False)
    return options


def submit(
    queue: str,
    submissions: Sequence[Submission],
    *,
    batch_id: str | None = None,
    limit: int = DEFAULT_QUEUE_LIMIT,
) -> Call[list[SubmitReply]]:
    """Enqueue jobs in order, as many as the queue's limit allows. One reply per job."""
    jobs = [part for item in submissions for part in (item.header, item.payload)]
    ids = tuple(item.job_id for item in submissions)
    parse = partial(_submit_replies, ids, submissions)
    script = "submit_after" if any(item.is_linked for item in submissions) else "submit"
    return Call(script, (keys.prefix(queue),), (batch_id or "", limit, *jobs), parse)


def _submit_replies(
    ids: tuple[str, ...], submissions: Sequence[Submission], reply: bytes
) -> list[SubmitReply]:
    status_line, *lines = reply.split(b"\n")
    if not lines and status_line == b" ".join([b"created"] * len(ids)):
        return [SubmitReply("created", own) for own in ids]
    words = (word.partition(":") for word in status_line.decode().split())
    replies = [SubmitReply(word, other or own) for own, (word, _, other) in zip(ids, words, strict=True)]  # type: ignore[arg-type]
    if not lines:
        return replies
    left = read_lines(lines)
    tenants = (keys.split_lane(json.loads(item.header)["lane"])[2] for item in submissions)
    return [replace(one, left=left.get(tenant)) for one, tenant in zip(replies, tenants, strict=True)]
