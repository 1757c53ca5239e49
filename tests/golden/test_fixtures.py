"""Data of released versions: still written the same, payloads byte for byte, and still read.

The members of a header come in any order.
"""

from __future__ import annotations

import json

import pytest

from pagemill.producer.wire.schema.checkpoints import merge_checkpoint
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.needs import LATER_FIELDS, known_words
from pagemill.producer.wire.schema.outputs import ErrorInfo, Result
from pagemill.producer.wire.schema.signing import Keys, split_payload
from tests.golden.cases import JOBS, KEY, QUEUE, RUN, SIGNED_AT_S
from tests.golden.write import members, read, submission_of

SUBMISSIONS, ENDS = read("jobs"), read("ends")
LATER_MEMBERS: dict[str, str] = {}
"""Values of fields, and members inside them, that came after 0.1.0, as `Job.task=sort` or `Message.images`; each with
the word that jobs with them need."""


def test_every_case_has_a_fixture() -> None:
    assert SUBMISSIONS.keys() == JOBS.keys()
    assert ENDS.keys() == RUN.keys()


def test_the_cases_set_every_field() -> None:
    assert set(Job.model_fields) - {name for fields in JOBS.values() for name in fields} == set()


def test_whatever_0_1_0_did_not_have_is_a_word_that_workers_must_know() -> None:
    """Otherwise a worker of 0.1.0 would pull a job that uses it, and end it as `invalid_job`."""

    def flat(parts: dict[str, list[str]]) -> set[str]:
        return {f"{part}.{member}" for part, names in parts.items() for member in names}

    first, now = flat(read("members")), flat(members())
    later = {
        name
        for name in now - first - LATER_MEMBERS.keys()
        if name.removeprefix("Job.").partition("=")[0] not in LATER_FIELDS
    }
    assert sorted(later) == [], (
        "add fields of a job to LATER_FIELDS in needs.py, all else to LATER_MEMBERS here"
    )
    assert sorted(first - now) == [], "jobs of 0.1.0 that use it would fail"
    assert LATER_FIELDS.keys() <= Job.model_fields.keys()
    assert set(LATER_MEMBERS.values()) <= set(known_words(has_store=True).split("+"))


@pytest.mark.parametrize("name", JOBS)
def test_a_submission_is_the_same_bytes(name: str) -> None:
    assert submission_of(name) == SUBMISSIONS[name]


@pytest.mark.parametrize("name", JOBS)
def test_an_envelope_is_read(name: str) -> None:
    kept = SUBMISSIONS[name]
    payload = split_payload(kept["signed"].encode())
    job = Job.from_payload(kept["signed"].encode())
    asked = Job.parse({"model": "echo"} | JOBS[name])
    assert job.model_copy(update={"seed": asked.seed, "keep_input": asked.keep_input}) == asked
    names = {"queue": QUEUE, "job_id": kept["header"]["id"], "tenant": job.tenant}
    Keys([KEY]).check_payload(payload, **names, submitted_at=SIGNED_AT_S)


def test_an_error_is_read() -> None:
    assert ErrorInfo.model_validate_json(ENDS["refused"]["outcome"]).code == "prompt_too_long"


def test_a_result_is_read() -> None:
    kept = ENDS["samples"]
    result = Result.model_validate_json(kept["outcome"])
    assert result.id == kept["id"]
    assert len(result.outputs) == 2
    for output in result.outputs:
        assert output.text
        assert output.logprobs is not None
        assert [entry.chosen.token_id for entry in output.logprobs] == list(output.token_ids)


def test_a_result_of_a_later_release_is_read() -> None:
    told = json.loads(ENDS["samples"]["outcome"])
    later = told | {"mood": 1, "usage": told["usage"] | {"joules": 2.5}}
    later["outputs"] = [output | {"aside": "x"} for output in told["outputs"]]
    assert Result.model_validate_json(json.dumps(later)) == Result.model_validate(told)


def test_a_checkpoint_is_read() -> None:
    kept = ENDS["samples"]
    entries = [entry.encode() for entry in kept["checkpoint"]]
    checkpoint = merge_checkpoint(entries)
    result = Result.model_validate_json(kept["outcome"])
    assert checkpoint is not None
    for sample in checkpoint.seqs:
        output = result.outputs[sample.index]
        assert output.token_ids[: len(sample.token_ids)] == sample.token_ids
        assert output.text.startswith(sample.text)
    ours = Keys([KEY])
    assert all(
        ours.is_entry_ours(entry, queue=QUEUE, job_id=kept["id"], fingerprint="weights") for entry in entries
    )
