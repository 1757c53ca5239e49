"""Placeholders in prompts, and the fields of jobs that wait for others."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pagemill import InvalidJob, Job, escape_places
from pagemill.producer.client.preparer import Preparer, item_id
from pagemill.producer.wire.calls import submissions
from pagemill.producer.wire.envelope import rendered
from pagemill.producer.wire.schema.signing import Keys
from pagemill.producer.wire.schema.templates import ParentOutput, places, render

LABEL = ParentOutput(id="l", state="succeeded", text=" positive", label="positive", prob=0.5)
BOOK = ParentOutput(
    id="b",
    state="succeeded",
    text=json.dumps({"title": "Über uns", "by": {"name": "{l.text}"}, "pages": 3, "none": None}),
)
NAMED = {"l": LABEL, "b": BOOK, "gone": ParentOutput(id="g", state="failed")}


@pytest.mark.parametrize(
    ("template", "text"),
    [
        ("no place", "no place"),
        ("{l.text}.", " positive."),
        ("{l.label} {l.label_prob}", "positive 0.5"),
        ("{b.parsed.title}, {b.parsed.pages}", "Über uns, 3"),
        ("{b.parsed.by}", '{"name": "{l.text}"}'),
        ("{b.parsed.by.name}", "{l.text}"),
        ('{"json": {l.text}}', '{"json":  positive}'),
        ("{l} {l.} {.text} { l.text} {l.text } {l.texts} {l.TEXT} {x}", None),
        ("{{l.text}} {{{l.text}}} {{{{l.text}}}}", "{l.text} {{l.text}} {{{l.text}}}"),
        ("<{gone.text}{gone.label}{gone.parsed.a}>", "<>"),
        ("{b.label}", BOOK.text),
    ],
)
def test_places_are_filled_and_the_rest_is_left(template: str, text: str | None) -> None:
    assert render(template, NAMED, 10_000) == (template if text is None else text)


@pytest.mark.parametrize(
    "template", ["{l.parsed.a}", "{b.label_prob}", "{b.parsed.none}", "{b.parsed.by.name.x}"]
)
def test_what_an_output_lacks_is_told(template: str) -> None:
    with pytest.raises(InvalidJob, match=r"the output of job [lb] has no "):
        render(template, NAMED, 10_000)


def test_a_rendered_prompt_is_bounded() -> None:
    big = {"l": ParentOutput(id="l", state="succeeded", text="é" * 1000)}
    assert len(render("{l.text}" * 5, big, 10_000)) == 5000
    with pytest.raises(InvalidJob) as refused:
        render("{l.text}" * 100_000, big, 10_000)
    assert refused.value.code == "payload_too_large"


@given(
    st.lists(st.sampled_from(["{", "}", "l", ".text", "l.text", "{l.text}", "x", "\n"]), max_size=30).map(
        "".join
    )
)
def test_an_escaped_text_is_itself(text: str) -> None:
    assert list(places(escape_places(text))) == []
    assert render(escape_places(text), NAMED, 10_000) == text


def test_many_braces_take_no_time_to_speak_of() -> None:
    """A quadratic search would not end within the test's limit."""
    assert render("{" * 1_000_000, NAMED, 2_000_000) == "{" * 1_000_000
    assert render("{l." * 300_000, NAMED, 2_000_000) == "{l." * 300_000


def job(**fields: Any) -> Job:
    return Job.parse({"prompt": "a", "model": "m"} | fields)


def test_lists_and_handles_are_named() -> None:
    class Handle:
        id = "x"

    assert job(after="x").after == {"parent": "x"}
    assert job(after=["x"]).after == {"parent": "x"}
    assert job(after=Handle()).after == {"parent": "x"}
    assert job(after=["x", "y"]).after == {"parent1": "x", "parent2": "y"}
    assert job(after={"a": Handle()}).after == {"a": "x"}


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"after": {}}, "after"),
        ({"after": [f"j{n}" for n in range(17)]}, "at most 16"),
        ({"after": {"a b": "x"}}, "after"),
        ({"after": {"a": "no id"}}, "after"),
        ({"after": {"a": "x", "b": "x"}}, "two names"),
        ({"when": {"a": {"text": "x"}}}, "go with after"),
        ({"on_parent_failure": "run"}, "go with after"),
        ({"after": ["x"], "when": {"a": {"text": "x"}}}, "after has no a"),
        ({"after": ["x"], "when": {"parent": {}}}, "a condition needs"),
        ({"after": ["x"], "when": {"parent": {"prob_below": 2}}}, "prob_below"),
        ({"after": ["x"], "when": {"parent": {"text": ["y" * 4000] * 3}}}, "8192 bytes"),
        ({"after": ["x"], "on_parent_failure": "ignore"}, "cancel"),
        ({"after": ["x"], "prompt": "{lable.text}"}, "`after` lacks lable"),
        (
            {"after": ["x"], "prompt": None, "messages": [{"role": "user", "content": "{y.text}"}]},
            "`after` lacks y",
        ),
    ],
)
def test_what_makes_no_sense_is_refused(fields: dict[str, Any], reason: str) -> None:
    with pytest.raises(InvalidJob, match=reason):
        job(**fields)


def test_a_prompt_of_another_kind_of_job_is_not_read() -> None:
    assert job(prompt="{a.text}").needs == "1"


def test_its_lane_says_that_it_waited() -> None:
    waits = job(after={"a": "x"}, when={"a": {"label": "y"}}, adapter="z", prompt="{a.text}")
    assert Job.from_payload(waits.to_payload()) == waits
    assert Job.from_payload(waits.to_payload() + b'\x1e{"id":"x"}') == waits
    header = json.loads(submissions.prepare(waits, "j").header)
    assert header["lane"] == "1+after:1:default:m#z"
    assert (header["after"], header["reads"]) == ("x", 1)
    assert json.loads(header["when"]) == {"x": {"label": ["y"]}}


def test_to_wait_for_another_job_is_other_work() -> None:
    works = {job().digest(), job(after=["x"]).digest(), job(after=["y"]).digest()}
    works |= {job(after=["x"], when={"parent": {"text": "y"}}).digest()}
    assert len(works) == 4


def test_a_prompt_that_begins_with_a_place_is_like_no_other() -> None:
    rest = "x" * 300
    assert job(prompt=rest + "{p.text}", after={"p": "x"}).affinity() == job(prompt=rest).affinity()
    assert job(prompt="{p.text}" + rest, after={"p": "x"}).affinity() is None
    turns = [{"role": "system", "content": "be kind"}, {"role": "user", "content": "{p.text}"}]
    asked = Job.parse({"messages": turns, "model": "m", "after": {"p": "x"}})
    assert asked.affinity() == Job.parse({"messages": turns[:1], "model": "m"}).affinity()
    turns[0]["content"] += "{p.text}"
    assert Job.parse({"messages": turns, "model": "m", "after": {"p": "x"}}).affinity() is None


def test_items_are_named_by_their_keys() -> None:
    rows = [{"prompt": "a", "model": "m", "key": "a"}] + [
        {"prompt": f"{n} {{p.text}}", "model": "m", "after": {"p": "key:a"}} for n in range(3)
    ]
    items = list(Preparer("q", "default", Keys()).items(rows, "b", on_invalid="raise", by_content=True))
    assert [json.loads(item.header).get("after") for item in items] == [None, *[item_id("b", "a")] * 3]
    assert [item.is_linked for item in items] == [False, True, True, True]
    assert len({item.job_id for item in items}) == 4
    with pytest.raises(InvalidJob, match="key: is for items of a batch"):
        Preparer("q", "default", Keys()).job(rows[1], {}, "j")


def test_a_job_is_rendered_with_what_it_was_given() -> None:
    stored = [b'{"id":"x","state":"succeeded","text":"t","more":1}']
    turns = [{"role": "system", "content": "s"}, {"role": "user", "content": "<{p.text}{q.text}>"}]
    asked = Job.parse({"messages": turns, "model": "m", "after": {"p": "x", "q": "y"}})
    both = [*stored, b'{"id":"y","state":"failed"}']
    assert [message.content for message in rendered(asked, both).messages or ()] == ["s", "<t>"]
    with pytest.raises(InvalidJob, match="the output of job y, which it waited for, is not there"):
        rendered(asked, stored)
    assert rendered(job(prompt="{p.text}", after={"p": "x"}), stored).prompt == "t"
    with pytest.raises(InvalidJob, match="is empty"):
        rendered(job(prompt="{p.text}", after={"p": "x"}), [b'{"id":"x","state":"failed"}'])
    with pytest.raises(InvalidJob, match="can't be read"):
        rendered(job(prompt="{p.text}", after={"p": "x"}), [b"{"])
