"""Preparation of a caller's jobs as submissions: validated, named, seeded and signed."""

from __future__ import annotations

import base64
import hashlib
import itertools
import json
import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, Literal, TypeAlias

from pagemill.producer.client.images import parse_job
from pagemill.producer.client.tracing import traced
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.calls.submission_form import (
    JobForm,
    JobForms,
    read_key,
    read_metadata,
    read_text,
)
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema import keys
from pagemill.producer.wire.schema.dependencies import ITEM_PREFIX
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import (
    MAX_KEY,
    MAX_METADATA_BYTES,
    MAX_PAYLOAD_BYTES,
    Job,
    work_digest,
)
from pagemill.producer.wire.schema.needs import BASE, STORE
from pagemill.producer.wire.schema.outputs import ErrorInfo
from pagemill.producer.wire.schema.sealing import ring
from pagemill.producer.wire.schema.signing import OUTPUT_SEPARATOR, Keys, split_payload
from pagemill.producer.wire.store.store import MAX_STORED_BYTES, Store, reference_to
from pagemill.producer.wire.store.stub import Upload, payload_stub, read_payload_stub

JobLike: TypeAlias = Job | Mapping[str, Any]
OnInvalid: TypeAlias = Literal["record", "raise"]

_SEED_HASH = hashlib.blake2b(digest_size=8, person=b"pagemill-seed")
IDEMPOTENCY_CONFLICT = "idempotency_conflict"
"""The code of an item whose key belongs to an earlier item with different work."""
_SALT_CHARS = hashlib.blake2b.SALT_SIZE
_MAX_REASON = 2000
"""Maximum characters of an error message that is stored with an invalid row."""


def new_job_id() -> str:
    return secrets.token_hex(12)


def new_batch_id() -> str:
    # Base32 has 16 characters for 80 bits; each is in the record of every job of the batch.
    return base64.b32encode(secrets.token_bytes(10)).decode().lower()


def item_id(batch_id: str, key: str) -> str:
    """Return the id of a batch's item, derived from batch and key, so that submitting it again finds the job."""
    return hashlib.blake2b(f"{batch_id}\0{key}".encode(), digest_size=12).hexdigest()


def check_id(name: str) -> str:
    """Return the id of a job or batch. Raises InvalidJob, also if it is not text."""
    return keys.check_name(keys.ID_PATTERN, keys.ID_RULE, name)


def seed_of(job_id: str) -> int:
    """Return the seed of a job without one, so that all of its executions draw the same random numbers.

    It is derived from the id, so that submitting an id again submits the same job.
    """
    hashed = _SEED_HASH.copy()
    hashed.update(job_id.encode())
    return int.from_bytes(hashed.digest(), "big") >> 1


def opened_envelope(envelope: bytes, job_id: str) -> bytes:
    """Return a decrypted envelope. Raises SealedError."""
    return ring().open(envelope, "job", job_id)


def peeked(jobs: Iterable[JobLike]) -> tuple[Iterable[JobLike], object]:
    """Return the same jobs, and the first of them, or () if there is none."""
    iterator = iter(jobs)
    for first in iterator:
        return itertools.chain([first], iterator), first
    return (), ()


class Preparer:
    """Creates the submissions of one producer."""

    def __init__(
        self,
        queue: str,
        tenant: str,
        hmac_keys: Keys,
        defaults: Mapping[str, Any] | None = None,
        store: Store | None = None,
    ) -> None:
        """`tenant` and `defaults` are for jobs that do not name these fields."""
        self._queue = queue
        self._defaults: dict[str, Any] = {"tenant": tenant, **(defaults or {})}
        self._hmac_keys = hmac_keys
        self._keyring = ring()
        self._store = store
        self.max_bytes = MAX_PAYLOAD_BYTES if store is None else MAX_STORED_BYTES
        self._may_change = bool(self._keyring or store is not None or hmac_keys)
        """Payloads are encrypted, signed, or put into a store."""

    def lacks_model(self, job: object, fields: Mapping[str, Any] | None = None) -> bool:
        """Return whether neither a job in the form of a mapping nor a default names its model."""
        is_mapping = job is None or isinstance(job, Mapping)
        return is_mapping and not any("model" in (given or {}) for given in (job, fields, self._defaults))  # type: ignore[operator]

    def job(
        self,
        job: JobLike | None,
        fields: Mapping[str, Any],
        job_id: str,
        *,
        traceparent: str | None = None,
        relay: str | None = None,
        waiter: str | None = None,
    ) -> Submission:
        """Prepare one job, from a Job or a mapping with `fields` added; `traceparent` replaces its own.

        `relay` is notified of its end through an outbox. `waiter` waits for it, and may end it by leaving.

        Raises InvalidJob.
        """
        built = self._build(job, fields)
        if traceparent is not None:
            built = built.model_copy(update={"traceparent": traceparent})
        if built.key is not None:
            raise InvalidJob("key names an item of a batch; use submit_many, or metadata")
        item = submissions.prepare(
            built, job_id, seed=seed_of(job_id), relay=relay, waiter=waiter, max_bytes=self.max_bytes
        )
        return self._signed(item, built.tenant)

    def checked(self, payload: bytes, job_id: str, submitted_at: float) -> bytes:
        """Return a payload's envelope as it is stored. Raises InvalidJob if no known key has signed it."""
        parts = split_payload(payload)
        reference = read_payload_stub(parts.envelope)
        job = Job.from_payload(opened_envelope(parts.envelope, job_id)) if reference is None else reference
        names = {"queue": self._queue, "job_id": job_id, "tenant": job.tenant}
        self._hmac_keys.check_payload(parts, **names, submitted_at=submitted_at)
        return parts.envelope

    def replay(self, payload: bytes, dead_id: str) -> Submission:
        """Prepare a dead job's payload as a new job that may start immediately. Raises InvalidJob."""
        job = Job.from_payload(opened_envelope(split_payload(payload).envelope, dead_id), self.max_bytes)
        again = job.model_copy(update={"delay": None, "run_at": None, "deadline": None, "key": None})
        job_id = new_job_id()
        # The dead job had received the ends that it waited for.
        outputs = split_payload(payload).outputs
        item = submissions.prepare(
            again, job_id, seed=seed_of(job_id), replay_of=dead_id, max_bytes=self.max_bytes
        )
        signed = self._signed(replace(item, is_linked=bool(outputs)), again.tenant)
        return replace(signed, payload=OUTPUT_SEPARATOR.join((signed.payload, *outputs)))

    def items(
        self,
        jobs: Iterable[JobLike],
        batch_id: str,
        *,
        on_invalid: OnInvalid,
        by_content: bool,
        compares_work: bool = False,
        traceparent: str | None = None,
        model: str | None = None,
    ) -> Iterator[Submission]:
        """Yield submissions for the items of a batch, lazily; `traceparent` is for items without one.

        `compares_work`: different work under the key of an earlier item is a conflict. The key of an item without one
        is its position or, in a batch that may be submitted again (`by_content`), the hash of its work and its number
        among equal items. `model`: for items without one.
        """
        if model is not None:
            defaults = {**self._defaults, "model": model}
            preparer = Preparer(self._queue, defaults["tenant"], self._hmac_keys, defaults, self._store)
            options: dict[str, Any] = {
                "by_content": by_content,
                "compares_work": compares_work,
                "traceparent": traceparent,
            }
            yield from preparer.items(jobs, batch_id, on_invalid=on_invalid, **options)
            return
        names = _Names(batch_id, by_content, compares_work)
        forms = JobForms()
        for position, given in enumerate(jobs):
            names.position = position
            try:
                row = given if traceparent is None else traced(given, traceparent)
                yield self._item(row, names, forms)
            except InvalidJob as error:
                if on_invalid == "raise":
                    raise InvalidJob(f"item {position}: {error}", error.code) from None
                refused = _record_row(given, names, error, self._defaults["tenant"])
                yield self._with_sealed_metadata(refused)

    def _item(self, given: JobLike, names: _Names, forms: JobForms) -> Submission:
        shape = None
        if type(given) is dict and "images" not in given:
            shape, form = forms.find(given)
            item = self._fill(form, given, names) if form is not None else None
            if form is not None and item is not None:
                return self._signed(item, form.tenant) if self._may_change else item
        job = self._build(given, {})
        if job.idempotency_key is not None:
            message = "idempotency_key is for single jobs; in a batch, `key` does its work"
            raise InvalidJob(message, "unsupported_feature")
        if job.after is not None:
            job = job.model_copy(update={"after": _resolved(job.after, names.batch_id)})
        key = job.key or names.of(job.digest)
        job_id = names.id_of(key)
        work = names.work_of(job_id, partial(_salted_digest, job)) if job.key else None
        item = submissions.prepare(
            job, job_id, key=key, seed=seed_of(job_id), work=work, max_bytes=self.max_bytes
        )
        forms.learn(shape, job)
        return self._signed(item, job.tenant)

    def _build(self, job: JobLike | None, fields: Mapping[str, Any]) -> Job:
        if isinstance(job, Job) and not fields and "tenant" in job.model_fields_set:
            return job
        given = dict(self._defaults)
        if isinstance(job, dict):
            given |= job
        elif isinstance(job, Job):
            given = {"tenant": given["tenant"]} | {name: getattr(job, name) for name in job.model_fields_set}
        elif isinstance(job, Mapping):
            given |= dict(job)
        elif job is not None:
            raise InvalidJob(f"a job is a Job or a mapping of its fields, not {type(job).__name__}")
        given |= fields
        return parse_job(given)

    def _fill(self, form: JobForm, row: dict[str, Any], names: _Names) -> Submission | None:
        """Prepare a row by its form; None if the row needs full validation."""
        text, key = read_text(row), read_key(row)
        metadata, is_sound = read_metadata(row)
        if text is None or key is None or not is_sound:
            return None
        if self._store is not None and self._store.takes(len(text.member)):
            return None
        name = key or names.of(lambda: form.digest(text))
        job_id = names.id_of(name)
        seed = seed_of(job_id) if form.needs_seed else None
        work = names.work_of(job_id, lambda salt: form.digest(text, salt)) if key else None
        return form.fill(text, job_id, name, metadata, seed, work)

    def _with_sealed_metadata(self, item: Submission) -> Submission:
        if not self._keyring or b'"metadata":' not in item.header:
            return item
        header = json.loads(item.header)
        if (text := header.get("metadata")) is not None:
            header["metadata"] = self._keyring.seal(text.encode(), "metadata", item.job_id).decode()
        return replace(item, header=json.dumps(header, separators=(",", ":")).encode())

    def _signed(self, item: Submission, tenant: str) -> Submission:
        if self._keyring:
            if item.is_linked and b'"when":' in item.header and "when" in json.loads(item.header):
                message = "the queue can't compare outputs (`when`) while they are encrypted"
                raise InvalidJob(message, "unsupported_feature", "when")
            item = self._with_sealed_metadata(item)
            item = replace(item, payload=self._keyring.seal(item.payload, "job", item.job_id))
        # The queue appends the outputs that a job waits for to its envelope in Redis.
        if self._store is not None and not item.is_linked and self._store.takes(len(item.payload)):
            item = _stored(item, self._store.new_uri(self._queue, "in", item.job_id), tenant)
        if not self._hmac_keys:
            return item
        payload = self._hmac_keys.sign_payload(
            item.payload, queue=self._queue, job_id=item.job_id, tenant=tenant
        )
        return replace(item, payload=payload)


def _salted_digest(job: Job, salt: str) -> str:
    return work_digest(job.settings_work(), job.prompt_work(), salt)


def _resolved(parents: Mapping[str, str], batch_id: str) -> dict[str, str]:
    """Return the parents by their ids, including those named by their keys in the batch."""
    return {
        name: item_id(batch_id, parent.removeprefix(ITEM_PREFIX))
        if parent.startswith(ITEM_PREFIX)
        else parent
        for name, parent in parents.items()
    }


class _Names:
    """The keys and ids of a batch's items."""

    def __init__(self, batch_id: str, by_content: bool, compares_work: bool) -> None:
        self.batch_id = batch_id
        self._compares_work = compares_work
        self.position = 0
        self._seen: dict[str, int] | None = {} if by_content else None
        self._hash = hashlib.blake2b(f"{batch_id}\0".encode(), digest_size=12)

    def of(self, digest: Callable[[], str]) -> str:
        """Return the key of an item without one; `digest` returns the digest of its work."""
        if self._seen is None:
            return str(self.position)
        work = digest()
        self._seen[work] = self._seen.get(work, 0) + 1
        return f"{work}-{self._seen[work]}"

    def work_of(self, job_id: str, digest: Callable[[str], str]) -> str | None:
        """Return the hash by which the queue compares items of one key, salted to reveal no other equality."""
        return digest(job_id[:_SALT_CHARS]) if self._compares_work else None

    def id_of(self, key: str) -> str:
        """Like `item_id`."""
        hashed = self._hash.copy()
        hashed.update(key.encode())
        return hashed.hexdigest()


def _stored(item: Submission, uri: str, tenant: str) -> Submission:
    """Return a submission whose payload is written to the store, and only its stub to Redis."""
    lane = re.sub(rb'"lane":"[^:]+', rb"\g<0>+%b" % STORE.encode(), item.header, count=1)
    header = b'%b,"stored":%b}' % (lane[:-1], json.dumps(uri).encode())
    stub = payload_stub(reference_to(uri, item.payload, tenant))
    return Submission(item.job_id, header, stub, upload=Upload(uri, item.payload))


def record_invalid(item: Submission, error: InvalidJob) -> Submission:
    """Return a submission that the queue rejected as a failed item of its batch."""
    header = json.loads(item.header)
    _, _, tenant, _ = keys.split_lane(header["lane"])
    # In a conflict its id belongs to the earlier item; repeating the conflict results in the same new id.
    is_conflict = error.code == IDEMPOTENCY_CONFLICT
    work = header.get("work")
    job_id = item_id(item.job_id, work) if is_conflict else item.job_id
    return _invalid(job_id, header["key"], header.get("metadata"), error, tenant, work)


def _record_row(given: object, names: _Names, error: InvalidJob, tenant: str) -> Submission:
    """Return an invalid row as a failed item of its batch. Its key and metadata are kept if valid."""
    fields: Mapping[str, Any] = given if isinstance(given, Mapping) else {}
    if isinstance(given, Job):  # valid, but too large
        fields = {"key": given.key, "metadata": given.metadata, "tenant": given.tenant}
    key, metadata, named = fields.get("key"), fields.get("metadata"), fields.get("tenant")
    if isinstance(named, str) and keys.TENANT_PATTERN.fullmatch(named):
        tenant = named
    if not (isinstance(key, str) and 0 < len(key) <= MAX_KEY and key.isprintable()):
        key = f"invalid-{names.position}"
    try:
        text = json.dumps(metadata, allow_nan=False) if isinstance(metadata, dict) else None
    except (ValueError, TypeError, RecursionError):
        text = None
    if text is not None and len(text) > MAX_METADATA_BYTES:
        text = None
    job_id = item_id(names.batch_id, key)
    work = names.work_of(job_id, lambda salt: work_digest(error.code.encode(), str(error).encode(), salt))
    return _invalid(job_id, key, text, error, tenant, work)


def _invalid(
    job_id: str, key: str, metadata: str | None, error: InvalidJob, tenant: str, work: str | None
) -> Submission:
    header = {
        "id": job_id,
        "key": key,
        "lane": keys.lane(BASE, "normal", tenant, "-"),
        "cost": 0,
        "invalid": ErrorInfo(code=error.code, message=str(error)[:_MAX_REASON]).model_dump_json(),
    }
    if metadata is not None:
        header["metadata"] = metadata
    if work is not None:
        header["work"] = work
    return Submission(job_id, json.dumps(header).encode(), b"")
