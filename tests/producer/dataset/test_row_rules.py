"""Null and empty rows, rows that are filtered out, and outputs that were cut off."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import pytest

from pagemill import Producer, StructuredOutputs
from pagemill.producer.dataset import report
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.template import Condition, PromptTemplate, TemplateFailed
from pagemill.producer.dataset.work import TooManyErrors
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker

ROWS = [
    {"text": "good", "title": "t", "stars": 5},
    {"text": None, "title": "t", "stars": 1},
    {"text": " \n", "title": None, "stars": 2},
    {"text": "no title", "title": None, "stars": None},
]


def cutting(queue: Queue, pulled: PulledJob) -> None:
    """Answer with a JSON object; the output for a prompt that contains "long" is cut off in the middle."""
    prompt = Job.from_payload(pulled.payload).prompt or ""
    is_cut = "long" in prompt
    whole = json.dumps({"label": prompt})
    output = Output(
        index=0,
        text=whole[:5] if is_cut else whole,
        finish_reason="length" if is_cut else "stop",
        parsed=None if is_cut else json.loads(whole),
    )
    result = Result(id=pulled.job_id, outputs=(output,), model="m").model_dump_json()
    queue.run(transitions.commit(queue.name, pulled.job_id, pulled.token, "succeeded", result))


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name):
        yield producer


@pytest.fixture
def json_producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name, cutting):
        yield producer


def simple(template: str = "{{ title }}: {{ text }}", **options: Any) -> Pipeline:
    return Pipeline(template, model="m", chat=False, **options)


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_null_and_empty_rows_fail_unless_told_otherwise(producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = simple().run(ROWS, out=out, producer=producer)
    assert [row["output"] for row in lines(out)] == ["t: good"]
    errors = lines(tmp_path / "out.jsonl.errors.jsonl")
    assert [(error["row"], error["code"]) for error in errors] == [
        (2, "null_in_prompt"), (3, "empty_row"), (4, "null_in_prompt"),
    ]  # fmt: skip
    assert errors[0]["message"] == "the template prints a null (text)"
    assert (summary.rows, summary.succeeded, summary.failed) == (4, 1, 3)


def test_they_can_be_skipped_and_are_counted(producer: Producer) -> None:
    summary = simple().run(pandas.DataFrame(ROWS), producer=producer, on_null="skip", on_empty="skip")
    assert list(summary.frame["output"].isna()) == [False, True, True, True]
    assert (summary.rows, summary.succeeded, summary.failed, summary.skipped) == (4, 1, 0, 3)
    assert summary.as_json()["skipped"] == 3
    figures = dict(report.figures(summary))
    assert figures["rows"] == "4 = 1 done + 0 failed + 3 skipped"
    assert (figures["skipped: null_in_prompt"], figures["skipped: empty_row"]) == ("2", "1")


def test_they_can_be_labeled_and_print_nothing(producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    simple().run(ROWS, out=out, producer=producer, on_null="label", on_empty="label")
    assert [row["output"] for row in lines(out)] == ["t: good", "t: ", ":  \n", ": no title"]


def test_another_rule_is_no_other_work(producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    simple().run(ROWS, out=out, producer=producer)
    summary = simple().run(ROWS, out=out, producer=producer, on_null="label", on_empty="skip")
    assert (summary.succeeded, summary.adopted, summary.skipped) == (3, 1, 1)


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        ("{% if x %}{{ x }}{% else %}-{% endif %}", "-"), ("{{ x or '-' }}", "-"),
        ("{{ x | default('-', true) }}", "-"), ("{{ x | tojson }}", "null"), ("{{ x is none }}", "True"),
        ("{{ x }}", None), ("{{ x | upper }}", None), ("{{ x | trim | truncate(5) }}", None),
        ("{{ x | replace('a', 'b') }}", None), ("{{ y.z }}", None),
    ],
)  # fmt: skip
def test_only_a_null_that_is_printed_counts(template: str, rendered: str | None) -> None:
    row = {"x": None, "y": {"z": None}}
    if rendered is None:
        with pytest.raises(TemplateFailed, match="prints a null"):
            PromptTemplate(template).render(row)
        rendered = ""
    else:
        assert PromptTemplate(template).render(row) == rendered
    assert PromptTemplate(template, nulls_are_empty=True).render(row) == rendered


def test_text_filters_are_themselves_for_text() -> None:
    template = PromptTemplate("{{ x | upper }} {{ x | replace('a', 'b') }} {{ x | indent }} {{ x | e }}")
    assert template.render({"x": "a<"}) == "A< b< a< a&lt;"


@pytest.mark.parametrize(
    ("where", "expected"),
    [
        ("stars >= 2", [0, 1]), ("stars >= 2 and lang == 'de'", [0]), ("lang in ('en', 'fr')", [1, 2]),
        ("not stars", [2]), ("'o' in text", [0, 1]), ('row["odd name"] is none', [2]),
        ("text | length > 3", [0, 2]),
    ],
)  # fmt: skip
def test_where_chooses_rows(where: str, expected: list[int], producer: Producer) -> None:
    rows = pandas.DataFrame(
        {
            "text": ["four", "two", "three"],
            "stars": [5, 2, 0],
            "lang": ["de", "en", "fr"],
            "odd name": ["x", "y", None],
        }
    )
    summary = simple("{{ text }}").run(rows, producer=producer, where=where)
    assert list(summary.frame.index) == expected
    assert list(summary.frame["output"]) == [rows["text"][i] for i in expected]


def test_limit_counts_the_rows_that_are_wanted(producer: Producer) -> None:
    rows = pandas.DataFrame({"text": list("abcd"), "n": [0, 1, 0, 1]})
    summary = simple("{{ text }}").run(rows, producer=producer, where="n == 1", limit=2)
    assert list(summary.frame["output"]) == ["b", "d"]


def test_a_row_that_where_fails_on_is_an_error_of_its_own(producer: Producer) -> None:
    rows = [{"text": "a", "stars": 3}, {"text": "b", "stars": "4"}]
    summary = simple("{{ text }}").run(pandas.DataFrame(rows), producer=producer, where="stars > 2")
    assert (summary.succeeded, summary.error_codes) == (1, {"where_failed": 1})


@pytest.mark.parametrize("where", ["stars >", "a }} {{ b", "{% if a %}", "__import__('os')"])
def test_what_is_no_expression_is_refused(where: str, producer: Producer) -> None:
    with pytest.raises(DatasetError, match="--where"):
        simple("{{ text }}").run(pandas.DataFrame({"text": ["a"]}), producer=producer, where=where)


@pytest.mark.parametrize(
    "where", ["text.__class__.__mro__", "''.__class__.__base__.__subclasses__()", "(1).__reduce__()"]
)
def test_an_expression_stays_in_its_sandbox(where: str) -> None:
    with pytest.raises(TemplateFailed):
        Condition(where).holds({"text": "a"})


def test_another_where_does_not_replace_a_finished_output(producer: Producer, tmp_path: Path) -> None:
    rows = [{"text": "a", "n": 1}, {"text": "b", "n": 2}]
    simple("{{ text }}").run(rows, out=tmp_path / "out.jsonl", producer=producer, where="n < 3")
    with pytest.raises(DatasetError, match="where:"):
        simple("{{ text }}").run(rows, out=tmp_path / "out.jsonl", producer=producer, where="n < 2")


CUT = pandas.DataFrame({"text": ["a", "too long", "b"]})


@pytest.mark.parametrize(
    "shape",
    [
        {"json_schema": '{"type": "object"}'},
        {"structured_outputs": StructuredOutputs(json='{"type": "object"}')},
    ],
    ids=["text", "object"],
)
def test_json_that_was_cut_off_is_not_done(shape: Any, json_producer: Producer) -> None:
    summary = simple("{{ text }}", **shape).run(CUT, producer=json_producer)
    found = list(summary.frame["output"])
    assert (found[0], found[2]) == ({"label": "a"}, {"label": "b"})
    assert found[1] is None or found[1] != found[1]
    assert (summary.succeeded, summary.failed, summary.as_json()["cut_off"]) == (2, 1, 1)
    assert (
        summary.first_failure
        == "row 2: output_cut_off: the output was cut off at max_tokens; raise --max-tokens"
    )


def test_text_that_was_cut_off_fails_only_if_told_to(json_producer: Producer) -> None:
    assert simple("{{ text }}").run(CUT, producer=json_producer).failed == 0
    assert simple("{{ text }}").run(CUT, producer=json_producer, on_truncated="fail").failed == 1
    schema = simple("{{ text }}", json_schema='{"type": "object"}')
    assert schema.run(CUT, producer=json_producer, on_truncated="label").failed == 0


def test_outputs_that_were_cut_off_count_to_max_errors(json_producer: Producer, tmp_path: Path) -> None:
    with pytest.raises(TooManyErrors, match="output_cut_off"):
        simple("{{ text }}").run(
            CUT, out=tmp_path / "out.jsonl", producer=json_producer, on_truncated="fail", max_errors=0
        )


def test_a_cut_output_of_an_earlier_version_is_not_taken_for_done(
    json_producer: Producer, tmp_path: Path
) -> None:
    out = tmp_path / "out.jsonl"
    schema = simple("{{ text }}", json_schema='{"type": "object"}')
    rows = [{"text": "a"}, {"text": "too long"}]
    schema.run(rows, out=out, producer=json_producer, on_truncated="label")
    assert schema.run(rows, out=out, producer=json_producer).as_json()["cut_off"] == 1


def test_rules_have_names(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="on_null is one of fail, skip, label"):
        simple().run(ROWS, out=tmp_path / "out.jsonl", on_null="drop")  # type: ignore[arg-type]
