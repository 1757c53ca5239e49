"""Rows that are filled into a form equal the rows that are encoded separately."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill.producer.client.preparer import Preparer
from pagemill.producer.wire.calls.submission_form import JobForms
from pagemill.producer.wire.calls.submissions import Submission
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.signing import Keys

PREPARER = Preparer("q", "acme", Keys())

# Characters that JSON escapes, that need several bytes, and (rarely) half of a surrogate pair.
TEXT = st.text(st.characters() | st.sampled_from('"\\\n\x00\x1f\x7fé€😀'), max_size=400)
KEY = st.none() | st.text(max_size=300) | st.just("k")
METADATA = st.none() | st.dictionaries(st.text(max_size=5), st.integers() | st.floats() | TEXT, max_size=3)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["system", "user", "assistant", "wizard"]), "content": TEXT}
    ),
    max_size=3,
)
SHAPES = st.sampled_from(
    [
        {},
        {"temperature": 0.0, "max_tokens": 4},
        {"temperature": 0, "dedupe": True},
        {"seed": 7, "dedupe": True, "n": 2},
        {"seed": 7, "temperature": 1.0, "top_k": 0, "top_p": 1, "dedupe": True},
        {"priority": "high", "tenant": "other", "ttl": 60.0, "max_attempts": 1, "stream": True},
        {"structured_outputs": {"choice": ["a", "b"]}, "stop": "x"},
        {"max_tokens": True},
        {"max_tokens": 1.0},
        {"color": "red"},
        {"idempotency_key": "k"},
        {"adapter": "red", "temperature": 0.0, "dedupe": True},
        {"adapter": "no good"},
    ]
)
ROWS = st.one_of(
    st.fixed_dictionaries({"prompt": TEXT, "key": KEY, "metadata": METADATA}),
    st.fixed_dictionaries({"prompt": TEXT}),
    st.fixed_dictionaries({"messages": MESSAGES, "metadata": METADATA}),
    st.fixed_dictionaries({"prompt": st.none() | TEXT, "messages": st.none() | MESSAGES}),
    st.fixed_dictionaries({"prompt_token_ids": st.lists(st.integers(-1, 9), max_size=3)}),
)


class NoForms(JobForms):
    """Every row separately."""

    def find(self, row: Any) -> Any:
        return None, None


def one_by_one(monkeypatch: pytest.MonkeyPatch, rows: list[Any], by_content: bool) -> list[Submission]:
    with monkeypatch.context() as patch:
        patch.setattr("pagemill.producer.client.preparer.JobForms", NoForms)
        return list(
            PREPARER.items(rows, "b", on_invalid="record", by_content=by_content, compares_work=by_content)
        )


def meaning(item: Submission) -> tuple[Any, Any]:
    header = json.loads(item.header)
    if "metadata" in header:
        header["metadata"] = json.loads(header["metadata"])
    job = Job.from_payload(item.payload) if item.payload else None
    return header, job, job and job.sampling({"temperature": 0.5, "top_k": 7, "top_p": 0.5})


@pytest.mark.slow
@given(shape=SHAPES, rows=st.lists(ROWS, min_size=1, max_size=6), by_content=st.booleans())
@settings(max_examples=300, deadline=None)
def test_a_filled_form_means_the_same(shape: dict[str, Any], rows: list[Any], by_content: bool) -> None:
    jobs = [{"model": "m"} | shape | row for row in rows]
    with pytest.MonkeyPatch.context() as monkeypatch:
        expected = one_by_one(monkeypatch, jobs, by_content)
    filled = list(
        PREPARER.items(jobs, "b", on_invalid="record", by_content=by_content, compares_work=by_content)
    )
    assert [meaning(item) for item in filled] == [meaning(item) for item in expected]


def test_forms_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[Any] = []
    parse = Job.parse
    monkeypatch.setattr(Job, "parse", lambda fields: parsed.append(fields) or parse(fields))
    rows = [{"model": "m", "prompt": f"p{i}", "temperature": 0.0, "metadata": {"row": i}} for i in range(50)]
    assert len(list(PREPARER.items(rows, "b", on_invalid="raise", by_content=False))) == 50
    assert len(parsed) == 2


def test_what_equality_takes_for_the_same_is_told_apart() -> None:
    forms = JobForms()
    names = {forms.find({"max_tokens": value})[0] for value in (1, 1.0, True)}
    assert len(names) == 3
    assert forms.find({"max_tokens": object()}) == (None, None)


def test_a_row_that_is_too_large_fails_alone() -> None:
    rows = [{"model": "m", "prompt": "p"}] * 2 + [{"model": "m", "prompt": "x" * (1 << 20)}]
    *_, last = PREPARER.items(rows, "b", on_invalid="record", by_content=True)
    assert json.loads(json.loads(last.header)["invalid"])["code"] == "payload_too_large"
