"""Replays of jobs as flows (see effects.py): read the stored job, run a copy, compare."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypedDict

from pagemill.common.fingerprint import may_continue
from pagemill.producer.client import flows, submit_flow
from pagemill.producer.client.effects import Emit, Flow
from pagemill.producer.client.preparer import Preparer, new_job_id, opened_envelope
from pagemill.producer.client.replay.comparison import Difference, compare
from pagemill.producer.client.replay.verification import Verification, has_plain_order, judge
from pagemill.producer.wire.calls import batches, reads, registry
from pagemill.producer.wire.calls.reads import Recorded
from pagemill.producer.wire.calls.registry import WorkerInfo
from pagemill.producer.wire.envelope import rendered
from pagemill.producer.wire.schema.errors import (
    InvalidJob,
    JobError,
    JobNotFound,
    ResultExpired,
    ResultTimeout,
    StoreError,
    Unverifiable,
)
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.signing import split_payload
from pagemill.producer.wire.store.store import MAX_STORED_BYTES

MAX_COPIES = 8
"""Maximum copies of a job, until one runs on a worker with the original's fingerprint."""
AT_ONCE = 32
"""Maximum concurrent copies of a batch's jobs."""
_IDS_AT_ONCE = 200


class Placement(TypedDict, total=False):
    """The workers for copies. `any_worker`: including those with another fingerprint, without a guarantee."""

    priority: Literal["high", "normal", "low"]
    any_worker: bool


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """How copies run, and the maximum seconds of each from submission to end.

    `revision`: on workers of that revision of the model, regardless of the original's. `is_counted`: in the tenant's
    ledger and quotas.
    """

    priority: Literal["high", "normal", "low"] = "low"
    timeout: float | None = None
    any_worker: bool = False
    revision: str | None = None
    is_counted: bool = True

    @property
    def is_anywhere(self) -> bool:
        """True if a copy counts regardless of its worker."""
        return self.any_worker or self.revision is not None


@dataclass(frozen=True, slots=True)
class _Original:
    """A job that can be replayed, and the id of its first copy."""

    job: Job
    result: Result
    copy: Job
    copy_id: str


def verify(queue: str, preparer: Preparer, job_id: str, options: ReplayOptions) -> Flow[Verification]:
    """Run a copy of a job that succeeded and compare the results. Raises Unverifiable, ResultTimeout, QueueFull."""
    original = yield from _begin(queue, preparer, job_id, options)
    return (yield from _finish(queue, preparer, original, options))


def verify_batch(
    queue: str, preparer: Preparer, batch_id: str, sample: int, options: ReplayOptions
) -> Flow[None]:
    """Emit a Verification for each of up to `sample` jobs of the batch, drawn at random. Raises JobNotFound."""
    counts = yield from flows.batch_counts(queue, batch_id)
    positions = sorted(random.sample(range(counts.total), min(sample, counts.total)))
    ids: list[str] = []
    for start in range(0, len(positions), _IDS_AT_ONCE):
        found: list[str] = yield batches.sample(queue, batch_id, positions[start : start + _IDS_AT_ONCE])
        ids += found
    yield from verify_each(queue, preparer, ids, options)


def verify_each(
    queue: str, preparer: Preparer, ids: Sequence[str], options: ReplayOptions
) -> Flow[tuple[int, int]]:
    """Emit a Verification for each job; returns the number that agreed, and the number compared."""
    agreed, compared = 0, 0
    waiting: deque[tuple[str, _Original | str]] = deque()
    for job_id in ids:
        try:
            begun: _Original | str = yield from _begin(queue, preparer, job_id, options)
        except Unverifiable as error:
            begun = str(error)
        waiting.append((job_id, begun))
        while waiting and (len(waiting) == AT_ONCE or job_id == ids[-1]):
            found = yield from _settled(queue, preparer, waiting.popleft(), options)
            compared += found.exactness is not None
            agreed += found.exactness not in (None, "neither")
            yield Emit(found)
    return agreed, compared


def _settled(
    queue: str, preparer: Preparer, begun: tuple[str, _Original | str], options: ReplayOptions
) -> Flow[Verification]:
    job_id, original = begun
    if isinstance(original, str):
        return Verification(id=job_id, reason=original)
    try:
        return (yield from _finish(queue, preparer, original, options))
    except (Unverifiable, ResultTimeout) as error:
        return Verification(id=job_id, reason=str(error))


def _begin(queue: str, preparer: Preparer, job_id: str, options: ReplayOptions) -> Flow[_Original]:
    """Read the job, check that a worker can run it, and submit the first copy."""
    found: Recorded = yield reads.recorded(queue, job_id)
    result = yield from stored_result(found, job_id)
    job = yield from submitted_job(found, preparer, job_id)
    yield from check_workers(queue, job, result, options)
    copy = copy_of(job, job_id, result, options)
    copy_id = yield from submit_copy(queue, preparer, copy, options)
    return _Original(job, result, copy, copy_id)


def stored_result(found: Recorded, job_id: str) -> Flow[Result]:
    """Return the result of a job that succeeded. Raises Unverifiable."""
    if found.outcome is None:
        raise Unverifiable(f"the stored result of job {job_id} is damaged: it can't be read")
    if found.outcome.state in (None, "queued", "delayed", "running"):
        if found.outcome.state is None:
            raise Unverifiable(f"no job {job_id}: never submitted, or its record has been removed")
        raise Unverifiable(f"job {job_id} is {found.outcome.state}: verify it once it has succeeded")
    try:
        result = (yield from flows.loaded(found.outcome)).value()
    except StoreError as error:
        raise Unverifiable(f"the result of job {job_id} can't be read: {error}") from None
    except ValueError:
        raise Unverifiable(f"the stored result of job {job_id} is damaged: it can't be read") from None
    except JobError as error:
        message = f"job {job_id} {error.state} ({error.code}): there is no result to compare a replay with"
        raise Unverifiable(message) from None
    except (JobNotFound, ResultExpired) as error:
        raise Unverifiable(str(error)) from None
    assert result is not None
    return result


def submitted_job(found: Recorded, preparer: Preparer, job_id: str) -> Flow[Job]:
    """Return a job as it was submitted. Raises Unverifiable if its input does not exist, or cannot be read."""
    if not found.payload:
        raise Unverifiable(
            f"the input of job {job_id} was not kept: submit with keep_input=True what is to be verified"
        )
    try:
        envelope = preparer.checked(found.payload, job_id, found.submitted_at)
        envelope = yield from flows.full_envelope(envelope)
        job = Job.from_payload(opened_envelope(envelope, job_id), MAX_STORED_BYTES)
        if job.after is None:
            return job
        alone = {"after": None, "when": None, "on_parent_failure": "cancel"}
        return rendered(job, split_payload(found.payload).outputs).model_copy(update=alone)
    except (InvalidJob, StoreError) as error:
        raise Unverifiable(f"the input of job {job_id} can't be used: {error}") from None


def check_workers(queue: str, job: Job, result: Result, options: ReplayOptions) -> Flow[None]:
    """Raise Unverifiable if no live worker can run the copy, or none has the same fingerprint."""
    alive: list[WorkerInfo] = yield registry.workers(queue)
    serving = [worker for worker in alive if job.model in worker.models]
    name = job.model if job.adapter is None else f"{job.model} with adapter {job.adapter}"
    if not any(job.adapter is None or job.adapter in worker.adapters for worker in serving):
        raise Unverifiable(f"no live worker serves {name}")
    if options.revision is not None and not any(worker.revision == options.revision for worker in serving):
        raise Unverifiable(f"no live worker of {name} announces revision {options.revision}")
    live = {worker.fingerprints.get(job.adapter or "", "") for worker in serving}
    if options.is_anywhere or "" in live:  # of a worker that does not report it
        return
    if not any(may_continue(result.fingerprint, fingerprint) for fingerprint in live):
        raise Unverifiable(
            f"no live worker of {name} computes what job {result.id} ran on, {result.fingerprint or 'unknown'}: those "
            f"alive are {', '.join(sorted(live))}; to compare with them anyway: any_worker (--any-worker)"
        )


def copy_of(job: Job, job_id: str, result: Result, options: ReplayOptions) -> Job:
    """Return the job to run again: the same work, without a schedule and without a dedupe key."""
    changed: dict[str, object] = {
        "tenant": job.tenant,
        "priority": options.priority,
        "metadata": {"verifies": job_id},
        **dict.fromkeys(
            ("deadline", "ttl", "delay", "run_at", "timeout", "idempotency_key", "key", "webhook")
        ),
        "dedupe": False,
        "stream": False,
        "traceparent": None,
    }
    if options.revision is not None:
        changed["revision"] = options.revision
    if job.needs_seed:
        changed["seed"] = result.seed
    return job.model_copy(update=changed)


def submit_copy(
    queue: str, preparer: Preparer, copy: Job, options: ReplayOptions, copy_id: str | None = None
) -> Flow[str]:
    """Submit a copy, under a new id unless one is passed. Raises Unverifiable."""
    try:
        item = preparer.job(copy, {}, copy_id or new_job_id())
        if not options.is_counted:
            item = item.uncounted()
        reply = yield from submit_flow.submit(queue, item, "raise")
        return reply.job_id
    except (InvalidJob, StoreError) as error:
        raise Unverifiable(f"a copy can't be submitted: {error}") from error


def _finish(
    queue: str, preparer: Preparer, original: _Original, options: ReplayOptions
) -> Flow[Verification]:
    """Wait for the copy, submit another if it ran on a wrong worker, and compare."""
    stored, copy_id, copies = original.result, original.copy_id, 1
    elsewhere: set[str] = set()
    while True:
        replayed = yield from end_of(queue, copy_id, options)
        if options.is_anywhere or may_continue(stored.fingerprint, replayed.fingerprint):
            break
        elsewhere.add(replayed.fingerprint)
        if copies == MAX_COPIES:
            raise Unverifiable(
                f"{copies} copies of job {stored.id} all ran on workers that compute something else "
                f"({', '.join(sorted(elsewhere))}), not {stored.fingerprint}"
            )
        copy_id = yield from submit_copy(queue, preparer, original.copy, options)
        copies += 1
    found = compare(stored, replayed)
    if found.difference is not None and found.difference.what == "token":
        scoring = _Scoring(original, found.difference, (stored, replayed))
        difference = yield from _scored(queue, preparer, scoring, options)
        found = found.model_copy(update={"difference": difference})
    promise, honoured, reason = judge(original.job, stored, replayed, found)
    return Verification(
        id=stored.id,
        exactness=found.exactness,
        promise=promise,
        honoured=honoured,
        comparison=found,
        reason=reason,
        replayed_as=copy_id,
        copies=copies,
        model=stored.model,
        seed=stored.seed,
        fingerprint=stored.fingerprint,
        replayed_fingerprint=replayed.fingerprint,
        tier=stored.tier,
        replayed_tier=replayed.tier,
    )


def end_of(queue: str, copy_id: str, options: ReplayOptions) -> Flow[Result]:
    """Wait for a copy. Raises Unverifiable or ResultTimeout."""
    try:
        return (yield from flows.wait_result(queue, copy_id, options.timeout))
    except ResultTimeout as error:
        yield from flows.cancel(queue, copy_id)
        waited = f"the copy, job {copy_id}, had not ended after {options.timeout} s, and is cancelled"
        raise ResultTimeout(f"{waited}: {error.reason}" if error.reason else waited, error.reason) from None
    except JobError as error:
        message = f"the copy, job {copy_id}, {error.state} ({error.code}): {error.message}"
        raise Unverifiable(message) from None


@dataclass(frozen=True, slots=True)
class _Scoring:
    """A token at which the two results diverge."""

    original: _Original
    difference: Difference
    results: tuple[Result, Result]

    def beginnings(self) -> list[tuple[int, ...] | None]:
        """Return both samples up to that token; None for one that had ended before."""
        length = (self.difference.position or 0) + 1
        samples = (
            next(one.token_ids for one in result.outputs if one.index == self.difference.output)[:length]
            for result in self.results
        )
        return [sample if len(sample) == length else None for sample in samples]

    def job(self) -> Job | None:
        """Return a job that scores both after the common prefix; None if the prompt is not available."""
        copy = self.original.copy
        if copy.task != "generate" or copy.is_parsed:
            return None
        kept = (
            "prompt",
            "messages",
            "prompt_token_ids",
            "model",
            "adapter",
            "revision",
            "tenant",
            "priority",
            "metadata",
        )
        fields = {name: getattr(copy, name) for name in (*kept, "truncate_prompt_tokens")}
        given = {name: value for name, value in fields.items() if value is not None}
        continuations = tuple(tokens for tokens in self.beginnings() if tokens is not None)
        return Job.parse({**given, "task": "score", "continuations": continuations})


def _scored(queue: str, preparer: Preparer, scoring: _Scoring, options: ReplayOptions) -> Flow[Difference]:
    """Return the difference with the log-probabilities of both tokens, if the replay's worker can score them."""
    difference = scoring.difference
    try:
        job = scoring.job()
        if job is None:
            return difference
        copy_id = yield from submit_copy(queue, preparer, job, options)
        scored = yield from end_of(queue, copy_id, options)
    except (Unverifiable, InvalidJob, ResultTimeout):
        return difference  # the difference is reported without them
    if not may_continue(scored.fingerprint, scoring.results[1].fingerprint):
        return difference
    known = iter(scored.outputs)
    stored, replayed = (
        None if tokens is None else _last_logprob(next(known)) for tokens in scoring.beginnings()
    )
    comparable = stored is not None and replayed is not None and has_plain_order(scoring.original.job)
    update = {
        "stored_logprob": stored if difference.stored_logprob is None else difference.stored_logprob,
        "replayed_logprob": replayed if difference.replayed_logprob is None else difference.replayed_logprob,
        "gap": abs((stored or 0.0) - (replayed or 0.0)) if comparable else None,
    }
    return difference.model_copy(update=update)


def _last_logprob(output: Output) -> float | None:
    return output.logprobs[-1].chosen.logprob if output.logprobs else None
