"""Recalls as flows (see effects.py): the jobs of a deviating worker run again, and the copies' results replace theirs.

The ids of copies are derived from the worker and the job, and jobs are settled in the order of the worker's list, so a
recall that is killed, or runs twice concurrently, continues and replaces each result once.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Literal

from pagemill.common.fingerprint import may_continue
from pagemill.producer.client.effects import Emit, Flow
from pagemill.producer.client.preparer import Preparer
from pagemill.producer.client.replay.flow import (
    MAX_COPIES,
    ReplayOptions,
    check_workers,
    copy_of,
    end_of,
    stored_result,
    submit_copy,
    submitted_job,
)
from pagemill.producer.wire.calls import audit, reads
from pagemill.producer.wire.calls.audit import SettleReply
from pagemill.producer.wire.calls.reads import Recorded
from pagemill.producer.wire.schema.errors import Unverifiable
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Result, WireModel
from pagemill.producer.wire.schema.sealing import ring

AT_ONCE = 32
"""Maximum concurrent copies."""
MAX_RESULT_BYTES = 7 << 20
"""Maximum size of a result that can replace another one."""


class Recalled(WireModel):
    """The outcome of one job of a recall."""

    id: str
    outcome: Literal["superseded", "left", "gone"]
    """left: its result stays, because of `reason`. gone: it no longer has a result."""
    copy_id: str | None = None
    is_changed: bool = False
    """The result that replaced the first one has other tokens."""
    reason: str | None = None


def run(queue: str, preparer: Preparer, worker_id: str, options: ReplayOptions) -> Flow[None]:
    """Emit a Recalled for each job of a worker's list, and end its recall.

    Raises Unverifiable or ResultTimeout if a copy cannot run now: the rest of the list stays.
    """
    while True:
        ids: list[str] = yield audit.listed_jobs(queue, worker_id, AT_ONCE)
        if not ids:
            break
        begun = []
        for job_id in ids:
            begun.append((yield from _begin(queue, preparer, worker_id, job_id, options)))
        for job_id, one in zip(ids, begun, strict=True):
            if isinstance(one, str):
                yield from _replace(queue, worker_id, Recalled(id=job_id, outcome="left", reason=one))
            else:
                yield from _finish(queue, preparer, worker_id, one, options)
    yield audit.close(queue, worker_id, keep=False)


def keep(queue: str, worker_id: str) -> Flow[bool]:
    """Keep a worker's results, and let it pull again. Returns False if it is not accused."""
    reply = -1
    while reply < 0:
        reply = yield audit.close(queue, worker_id, keep=True)
    return bool(reply)


@dataclass(frozen=True, slots=True)
class _Begun:
    """A job whose first copy was submitted."""

    job_id: str
    copy: Job
    result: Result


def _begin(
    queue: str, preparer: Preparer, worker_id: str, job_id: str, options: ReplayOptions
) -> Flow[_Begun | str]:
    """Submit the first copy. Returns the reason if a job cannot be copied."""
    found: Recorded = yield reads.recorded(queue, job_id)
    try:
        result = yield from stored_result(found, job_id)
        job = yield from submitted_job(found, preparer, job_id)
    except Unverifiable as error:
        return str(error)
    yield from check_workers(queue, job, result, options)
    copy = copy_of(job, job_id, result, options).model_copy(update={"metadata": {"recalls": job_id}})
    yield from submit_copy(queue, preparer, copy, options, _copy_id(worker_id, job_id, 0))
    return _Begun(job_id, copy, result)


def _finish(
    queue: str, preparer: Preparer, worker_id: str, begun: _Begun, options: ReplayOptions
) -> Flow[None]:
    """Wait for a copy of the same fingerprint, and replace the job's result by that of the copy."""
    job_id = begun.job_id
    reason = ""
    for number in range(MAX_COPIES):
        copy_id = _copy_id(worker_id, job_id, number)
        if number:
            yield from submit_copy(queue, preparer, begun.copy, options, copy_id)
        try:
            computed = yield from end_of(queue, copy_id, options)
        except Unverifiable as error:  # an earlier recall may have given up waiting, and canceled it
            reason = str(error)
            continue
        if options.any_worker or may_continue(begun.result.fingerprint, computed.fingerprint):
            break
        reason = f"a copy ran on workers that compute something else ({computed.fingerprint})"
    else:
        yield from _replace(queue, worker_id, Recalled(id=job_id, outcome="left", reason=reason))
        return
    replaced = computed.model_copy(update={"id": job_id, "metadata": begun.result.metadata})
    body = replaced.model_dump_json(exclude_none=True).encode()
    if len(body) > MAX_RESULT_BYTES:
        reason = "the result of the copy is too large to replace another"
        yield from _replace(
            queue, worker_id, Recalled(id=job_id, outcome="left", copy_id=copy_id, reason=reason)
        )
        return
    changed = [one.token_ids for one in computed.outputs] != [one.token_ids for one in begun.result.outputs]
    recalled = Recalled(id=job_id, outcome="superseded", copy_id=copy_id, is_changed=changed)
    yield from _replace(queue, worker_id, recalled, ring().seal(body, "result", job_id))


def _replace(queue: str, worker_id: str, recalled: Recalled, body: bytes = b"") -> Flow[None]:
    copy_id = recalled.copy_id if body else ""
    word: SettleReply = yield audit.replace_first(queue, worker_id, recalled.id, copy_id or "", body)
    if word != "already_done":
        yield Emit(recalled.model_copy(update={"outcome": word}))


def _copy_id(worker_id: str, job_id: str, number: int) -> str:
    return "recall-" + hashlib.sha256(f"{worker_id} {job_id} {number}".encode()).hexdigest()[:32]
