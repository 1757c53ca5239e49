"""An envelope is opened by one call: signature, store, encryption, fields, outputs of parents."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.envelope import is_stored, open_envelope
from pagemill.producer.wire.schema.errors import JobError
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.sealing import KeyRing
from pagemill.producer.wire.schema.signing import OUTPUT_SEPARATOR, Keys
from pagemill.producer.wire.schema.templates import ParentOutput
from pagemill.producer.wire.store.store import Store, reference_to
from pagemill.producer.wire.store.stub import payload_stub

KEY, RING = Keys(["k" * 16]), KeyRing({"one": b"s" * 32})
JOB = Job.parse({"prompt": "secret", "model": "m", "tenant": "t"})


def pulled(payload: bytes) -> PulledJob:
    return PulledJob("j", 1, payload, "", (), 1, 0, False, time.time(), None)


def opened(payload: bytes, **options: Any) -> Job:
    return open_envelope(
        pulled(payload), **({"queue": "q", "keys": Keys(), "keyring": KeyRing({})} | options)
    )


def refusal(payload: bytes, **options: Any) -> tuple[str, bool]:
    with pytest.raises(JobError) as error:
        opened(payload, **options)
    assert "secret" not in str(error.value)
    return error.value.code, error.value.retryable


def signed(envelope: bytes, tenant: str = "t") -> bytes:
    return KEY.sign_payload(envelope, queue="q", job_id="j", tenant=tenant)


def test_a_plain_envelope_is_the_job() -> None:
    assert opened(JOB.to_payload()) == JOB
    for broken in (b"", b"{", b'{"v":99}', JOB.to_payload()[:-5]):
        assert refusal(broken) == ("invalid_job", False)


def test_signature_and_encryption_are_checked() -> None:
    sealed = RING.seal(JOB.to_payload(), "job", "j")
    options = {"keys": KEY, "keyring": RING}
    assert opened(signed(sealed), **options) == JOB
    assert refusal(sealed, **options) == ("unsigned", False)
    assert refusal(signed(sealed, tenant="other"), **options) == ("unsigned", False)
    assert refusal(signed(sealed), keys=KEY) == ("sealed", False)
    assert refusal(JOB.to_payload(), keyring=KeyRing({}, is_required=True)) == ("sealed", False)


def test_outputs_of_parents_are_refused_in_clear_where_encryption_is_required() -> None:
    child = Job.parse({"prompt": "{one.text}", "model": "m", "tenant": "t", "after": {"one": "p"}})
    strict = KeyRing({"one": b"s" * 32}, is_required=True)
    sealed = strict.seal(child.to_payload(), "job", "j")
    parent = ParentOutput(id="p", state="succeeded", text="secret").model_dump_json().encode()
    payload = sealed + OUTPUT_SEPARATOR + parent
    assert opened(payload, keyring=RING).prompt == "secret"
    assert refusal(payload, keyring=strict) == ("sealed", False)


def test_a_stored_envelope_is_fetched_once_its_stub_is_verified(tmp_path: Path) -> None:
    store = Store(f"file://{tmp_path}")
    uri = store.new_uri("q", "in", "j")
    data = RING.seal(JOB.to_payload(), "job", "j")
    reference = reference_to(uri, data, "t")
    stub = signed(payload_stub(reference))
    options = {"keys": KEY, "keyring": RING, "store": store}
    assert is_stored(stub)
    assert not is_stored(signed(JOB.to_payload()))
    assert refusal(payload_stub(reference), **options) == ("unsigned", False)  # the file does not exist yet
    assert refusal(stub, **options) == ("payload_lost", False)
    store.write(uri, data)
    assert opened(stub, **options) == JOB
    for_other = payload_stub(reference.model_copy(update={"tenant": "other"}))
    assert refusal(signed(for_other, "other"), **options) == ("unsigned", False)
    store.write(uri, data[:-1] + b"?")
    assert refusal(stub, **options) == ("payload_lost", False)


def test_a_store_that_does_not_answer_is_worth_a_retry(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(f"file://{tmp_path}")
    stub = payload_stub(reference_to(store.new_uri("q", "in", "j"), b"{}", "t"))
    monkeypatch.setattr("fsspec.implementations.local.LocalFileSystem.cat_file", lambda *_, **__: 1 / 0)
    assert refusal(stub, store=store) == ("store_unavailable", True)


def test_outputs_of_parents_are_rendered() -> None:
    job = Job.parse({"prompt": "<{a.text}>", "model": "m", "after": {"a": "parent"}})
    output = ParentOutput(id="parent", state="succeeded", text="one")
    payload = job.to_payload() + OUTPUT_SEPARATOR + output.model_dump_json().encode()
    assert opened(payload).prompt == "<one>"
    assert refusal(job.to_payload()) == ("invalid_job", False)
