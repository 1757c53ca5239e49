"""Signatures: their coverage, two keys, and their position in front of the JSON."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill import InvalidJob, Producer
from pagemill.producer.wire.schema.checkpoints import merge_checkpoint
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys, split_payload, unsigned_entry
from tests.producer.driving import delta

OLD, NEW, OTHER = "o" * 16, b"n" * 32, "x" * 16
NAMES = {"queue": "q", "job_id": "j", "tenant": "t"}
ENVELOPE = Job.parse({"prompt": "p", "model": "m"}).to_payload()


def refusal(payload: bytes, keys: Keys, submitted_at: float | None = None, **names: str) -> str | None:
    try:
        keys.check_payload(
            split_payload(payload),
            submitted_at=time.time() if submitted_at is None else submitted_at,
            **(NAMES | names),
        )
    except InvalidJob as error:
        return error.code
    return None


def test_a_signed_envelope_is_still_json_and_still_the_job() -> None:
    payload = Keys([NEW]).sign_payload(ENVELOPE, **NAMES)
    assert json.loads(payload) | json.loads(ENVELOPE) == json.loads(payload)
    assert split_payload(payload).envelope == ENVELOPE
    assert Job.from_payload(payload) == Job.from_payload(ENVELOPE)


def test_two_keys_are_active_while_they_are_changed() -> None:
    by_old, by_new = (Keys([key]).sign_payload(ENVELOPE, **NAMES) for key in (OLD, NEW))
    both = Keys([NEW, OLD])
    assert refusal(by_old, both) is None
    assert refusal(by_new, both) is None
    assert refusal(by_old, Keys([NEW])) == "unsigned"
    assert refusal(both.sign_payload(ENVELOPE, **NAMES), Keys([NEW])) is None, "the first key signs"
    assert refusal(ENVELOPE, both) == "unsigned"
    assert refusal(ENVELOPE, Keys()) is None


@pytest.mark.parametrize("name", ["queue", "job_id", "tenant"])
def test_a_signature_is_for_one_job_only(name: str) -> None:
    payload = Keys([NEW]).sign_payload(ENVELOPE, **NAMES)
    assert refusal(payload, Keys([NEW]), **{name: "another"}) == "unsigned"


def test_a_signature_is_for_one_time_only() -> None:
    payload = Keys([NEW]).sign_payload(ENVELOPE, **NAMES)
    assert refusal(payload, Keys([NEW]), time.time() + 60) is None
    with pytest.raises(InvalidJob, match=r"synchronize the clocks of producer and Redis server"):
        Keys([NEW]).check_payload(split_payload(payload), submitted_at=time.time() + 7200, **NAMES)


@settings(max_examples=300)
@given(st.data())
def test_no_byte_can_be_changed(data: st.DataObject) -> None:
    payload = bytearray(Keys([NEW]).sign_payload(ENVELOPE, **NAMES))
    place = data.draw(st.integers(0, len(payload) - 1))
    payload[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != payload[place]))
    assert refusal(bytes(payload), Keys([NEW])) == "unsigned"


def test_checkpoint_entries_are_signed_for_one_job_and_one_engine() -> None:
    names = {"queue": "q", "job_id": "j", "fingerprint": "f"}
    keys = Keys([NEW])
    entry = delta(0, 1, 2).model_dump_json().encode()
    signed = keys.sign_entry(entry, **names)
    assert signed == keys.sign_entry(entry, **names), "a repeated write must be the same bytes"
    assert unsigned_entry(signed) == entry
    assert keys.is_entry_ours(signed, **names)
    assert not keys.is_entry_ours(entry, **names)
    assert Keys().is_entry_ours(entry, **names)
    for name in names:
        assert not keys.is_entry_ours(signed, **(names | {name: "another"}))
    read = merge_checkpoint([signed])
    assert read is not None
    assert read.seqs[0].token_ids == (1, 2)


def test_a_checkpoint_with_a_gap_is_none() -> None:
    entries = [delta(0, 1, 2).model_dump_json().encode(), delta(3, 4).model_dump_json().encode()]
    with pytest.raises(ValueError, match="gap"):
        merge_checkpoint(entries)


@pytest.mark.parametrize("keys", [["short"], [OLD, NEW, OTHER]])
def test_keys_that_are_too_short_or_too_many_are_refused(keys: list[str | bytes]) -> None:
    with pytest.raises(InvalidJob):
        Keys(keys)


def test_keys_are_not_shown() -> None:
    assert OLD not in repr(Keys([OLD]))
    assert OLD not in repr(Producer(hmac_key=OLD))


def test_the_environment_gives_a_producer_its_key(
    monkeypatch: pytest.MonkeyPatch, valkey_url: str, queue_name: str
) -> None:
    monkeypatch.setenv("PAGEMILL_HMAC_KEYS", f"{OLD},{OTHER}")
    with Producer(valkey_url, queue=queue_name) as producer:
        job_id = producer.submit(prompt="p", model="m").id
        payload = producer._connected().transport.client.get(f"pagemill:{{{queue_name}}}:in:{job_id}")
    assert refusal(payload, Keys([OLD]), queue=queue_name, job_id=job_id, tenant="default") is None
