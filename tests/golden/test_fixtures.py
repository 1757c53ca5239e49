"""Data of released versions: still written the same, payloads byte for byte, and still read.

The members of a header come in any order.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from pagemill.producer.wire.schema.checkpoints import merge_checkpoint
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import ErrorInfo, Result
from pagemill.producer.wire.schema.signing import Keys, split_payload
from tests.golden.cases import JOBS, KEY, QUEUE, RUN, SIGNED_AT_S
from tests.golden.write import bulk_submissions, read, signed_entry, submission_of

SUBMISSIONS, ITEMS, ENDS = read("submissions"), read("items"), read("ends")


def test_every_case_has_a_fixture() -> None:
    assert SUBMISSIONS.keys() == JOBS.keys()
    assert ENDS.keys() == RUN.keys()


@pytest.mark.parametrize("name", JOBS)
def test_a_submission_is_the_same_bytes(name: str) -> None:
    assert submission_of(name) == SUBMISSIONS[name]


def test_so_are_the_items_of_a_batch() -> None:
    written = bulk_submissions()
    assert written.keys() == ITEMS.keys()
    assert [name for name in ITEMS if written[name] != ITEMS[name]] == []


@pytest.mark.parametrize("name", JOBS)
def test_an_envelope_is_read(name: str) -> None:
    kept = SUBMISSIONS[name]
    payload = split_payload(kept["signed"].encode())
    job = Job.from_payload(kept["signed"].encode())
    asked = Job.parse({"model": "echo"} | JOBS[name])
    assert job.model_copy(update={"seed": asked.seed}) == asked
    assert replace(payload, mac=None, signed_at_ms=0).envelope == kept["payload"].encode()
    Keys([KEY]).check_payload(
        payload, queue=QUEUE, job_id=kept["id"], tenant=job.tenant, submitted_at=SIGNED_AT_S
    )


@pytest.mark.parametrize("name", RUN)
def test_an_end_is_read(name: str) -> None:
    kept = ENDS[name]
    if kept["state"] != "succeeded":
        assert ErrorInfo.model_validate_json(kept["outcome"]).code == "prompt_too_long"
        return
    result = Result.model_validate_json(kept["outcome"])
    assert result.id == kept["id"]
    assert len(result.outputs) == RUN[name].get("n", 1)
    for output in result.outputs:
        assert output.text
        assert output.finish_reason in ("stop", "length")
        if "logprobs" in RUN[name]:
            assert output.logprobs is not None
            assert [entry.chosen.token_id for entry in output.logprobs] == list(output.token_ids)


@pytest.mark.parametrize("name", [name for name in RUN if ENDS[name]["checkpoint"]])
def test_a_checkpoint_is_read(name: str) -> None:
    kept = ENDS[name]
    checkpoint = merge_checkpoint([entry.encode() for entry in kept["checkpoint"]])
    result = Result.model_validate_json(kept["outcome"])
    assert checkpoint is not None
    for sample in checkpoint.seqs:
        output = result.outputs[sample.index]
        assert output.token_ids[: len(sample.token_ids)] == sample.token_ids
        assert output.text.startswith(sample.text)
    assert [signed_entry(entry, kept["id"]) for entry in kept["checkpoint"]] == kept["signed"]
    signed = [entry.encode() for entry in kept["signed"]]
    assert merge_checkpoint(signed) == checkpoint
    assert all(
        Keys([KEY]).is_entry_ours(entry, queue=QUEUE, job_id=kept["id"], fingerprint="weights")
        for entry in signed
    )
