"""Opens a pulled job's envelope: converts the stored bytes to the job that a worker runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic import ValidationError

from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.errors import InvalidJob, JobError, StoreError
from pagemill.producer.wire.schema.images import Content, ImagePart, TextPart, texts_of
from pagemill.producer.wire.schema.job import MAX_PAYLOAD_BYTES, Job
from pagemill.producer.wire.schema.outputs import Output, Result
from pagemill.producer.wire.schema.sealing import KeyRing, ring
from pagemill.producer.wire.schema.signing import Keys, split_payload
from pagemill.producer.wire.schema.templates import ParentOutput, places, render
from pagemill.producer.wire.store.store import MAX_STORED_BYTES, Store
from pagemill.producer.wire.store.stub import read_payload_stub


def is_stored(payload: bytes) -> bool:
    """Return whether the envelope is in a store: opening it may then take as long as the store does."""
    return read_payload_stub(split_payload(payload).envelope) is not None


def open_envelope(
    pulled: PulledJob, *, queue: str, keys: Keys, keyring: KeyRing, store: Store | None = None
) -> Job:
    """Verify the signature, fetch from the store, decrypt, parse, and render the outputs of parents.

    Raises:
        JobError: the code and message that the job fails with, which do not quote its input; `retryable` if
            the store does not answer.
    """
    payload = split_payload(pulled.payload)
    reference = None if store is None else read_payload_stub(payload.envelope)
    names = {"queue": queue, "job_id": pulled.job_id}
    try:
        if store is None or reference is None:
            job = Job.from_payload(keyring.open(payload.envelope, "job", pulled.job_id))
            keys.check_payload(payload, **names, tenant=job.tenant, submitted_at=pulled.submitted_at)
        else:
            keys.check_payload(payload, **names, tenant=reference.tenant, submitted_at=pulled.submitted_at)
            stored = keyring.open(store.read(reference), "job", pulled.job_id)
            job = Job.from_payload(stored, MAX_STORED_BYTES)
            if job.tenant != reference.tenant:
                raise InvalidJob("the stored payload is another tenant's job", "unsigned")
        return job if job.after is None else rendered(job, payload.outputs, keyring)
    except StoreError as error:
        code = "store_unavailable" if error.retryable else "payload_lost"
        raise JobError(str(error), code, error.retryable) from error
    except InvalidJob as error:
        raise JobError(str(error), error.code) from error


def _in_clear(output: ParentOutput, keyring: KeyRing) -> ParentOutput:
    """Return a decrypted output. Raises SealedError."""
    if output.sealed is None:
        if output.text or output.label:
            keyring.check_clear("result")
        return output
    result = Result.model_validate_json(keyring.open(output.sealed.encode(), "result", output.computed_by))
    first = result.outputs[0] if result.outputs else Output(index=0)
    prob = (first.label_probs or {}).get(first.label or "")
    return output.model_copy(update={"text": first.text, "label": first.label, "prob": prob, "sealed": None})


def rendered(job: Job, stored: Sequence[bytes], keyring: KeyRing | None = None) -> Job:
    """Return a job with the outputs of its parents inserted into its prompt.

    Args:
        stored: the outputs that the queue appended to its envelope.
        keyring: the keys to decrypt outputs; None: those of the environment.

    Raises:
        InvalidJob: an output is missing, can't be read or lacks a field, or the prompt becomes empty or too large.
    """
    found: dict[str, ParentOutput] = {}
    keyring = ring() if keyring is None else keyring
    try:
        for line in stored:
            output = _in_clear(ParentOutput.model_validate_json(line), keyring)
            found[output.id] = output
    except ValidationError:
        raise InvalidJob("the output of a job that it waited for can't be read", param="after") from None
    after = job.after or {}
    reads = any(True for _, text in job.templates() for _ in places(text))
    if reads and (missing := sorted(set(after.values()) - found.keys())):
        raise InvalidJob(f"the output of job {missing[0]}, which it waited for, is not there", param="after")
    named = {name: found[parent] for name, parent in after.items() if parent in found}
    room = MAX_PAYLOAD_BYTES
    if job.prompt is not None:
        prompt = render(job.prompt, named, room)
        if not prompt:
            raise InvalidJob("with the outputs put in, the prompt is empty", param="prompt")
        return job.model_copy(update={"prompt": prompt})
    if job.messages is None:
        return job
    messages = []
    for message in job.messages:
        if message.content is not None:
            content = _filled(message.content, named, room)
            room -= sum(len(text.encode()) for text in texts_of(content))
            message = message.model_copy(update={"content": content})
        messages.append(message)
    return job.model_copy(update={"messages": tuple(messages)})


def _filled(content: Content, named: Mapping[str, ParentOutput], room: int) -> Content:
    if isinstance(content, str):
        return render(content, named, room)
    parts: list[TextPart | ImagePart] = []
    for part in content:
        if isinstance(part, TextPart):
            part = part.model_copy(update={"text": render(part.text, named, room)})
            room -= len(part.text.encode())
        parts.append(part)
    return tuple(parts)
