"""The fields of a schema as columns, and sample rows in the report."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import pandas
import polars
import pyarrow
import pytest
from pyarrow import parquet
from pydantic import BaseModel

from pagemill import Producer
from pagemill.producer.dataset import report
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline, RecipePipeline
from pagemill.producer.dataset.schema_fields import schema_fields
from pagemill.producer.dataset.summary import MAX_SAMPLE_CHARACTERS, SAMPLES, Summary
from pagemill.producer.dataset.tables.rows import Row, open_source
from pagemill.producer.wire.calls import transitions
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.outputs import Output, Result
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker


class Place(BaseModel):
    city: str


class Review(BaseModel):
    label: Literal["good", "bad"]
    stars: int
    share: float | None = None
    is_long: bool
    place: Place | None = None
    tags: list[str]


VALUES = {
    "label": "good",
    "stars": 4,
    "share": None,
    "is_long": False,
    "place": {"city": "ü"},
    "tags": ["a", "b"],
}
ROWS = [{"text": "a"}, {"text": "b"}]


def answering(queue: Queue, pulled: PulledJob) -> None:
    prompt = Job.from_payload(pulled.payload).prompt
    values = VALUES if prompt == "a" else {**VALUES, "label": "bad", "share": 0.5, "place": None}
    output = Output(index=0, text=json.dumps(values), finish_reason="stop", parsed=values)
    result = Result(id=pulled.job_id, outputs=(output,), model="m").model_dump_json()
    queue.run(transitions.commit(queue.name, pulled.job_id, pulled.token, "succeeded", result))


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with (
        Producer(valkey_url, queue=queue_name) as producer,
        scripted_worker(valkey_url, queue_name, answering),
    ):
        yield producer


def pipeline(**options: Any) -> Pipeline:
    return Pipeline("{{ text }}", model="m", chat=False, json_schema=Review, **options)


def recipe() -> Pipeline:
    """The same as a recipe of one step."""
    step = {"name": "output", "prompt": "{{ text }}", "chat": False, "json_schema": Review}
    return RecipePipeline({"model": "m", "steps": [step]})


COLUMNS = [f"output.{name}" for name in Review.model_fields]


@pytest.mark.parametrize("made", [pipeline, recipe])
@pytest.mark.parametrize("name", ["out.jsonl", "out.csv", "out.parquet"])
def test_each_field_is_a_column(name: str, made: Any, producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / name
    for adopted in (0, 2):
        summary = made().run(ROWS, out=out, producer=producer, schema_columns=True)
        assert (summary.succeeded, summary.adopted) == (2, adopted)
    first, second = (row.fields or {} for row in open_source(out).rows())
    assert list(first) == ["text", "output", *COLUMNS, "_pagemill"]
    assert [first["output.label"], second["output.label"]] == ["good", "bad"]
    if name == "out.jsonl":
        assert first["output.place"] == {"city": "ü"}
    if name == "out.csv":
        assert (first["output.stars"], first["output.tags"], first["output.share"]) == ("4", '["a", "b"]', "")
    if name == "out.parquet":
        types = dict(zip(parquet.read_schema(out).names, parquet.read_schema(out).types, strict=True))
        assert [types[column] for column in COLUMNS] == [
            pyarrow.string(), pyarrow.int64(), pyarrow.float64(), pyarrow.bool_(), pyarrow.string(), pyarrow.string(),
        ]  # fmt: skip
        assert second["output.share"] == 0.5


@pytest.mark.parametrize(
    "make", [pandas.DataFrame, polars.DataFrame, lambda rows: pyarrow.Table.from_pylist(rows)]
)
def test_so_it_is_in_a_frame(make: Any, producer: Producer) -> None:
    frame = pipeline().run(make(ROWS), producer=producer, schema_columns=True, output_column="r").frame
    assert [str(name) for name in (frame.column_names if isinstance(frame, pyarrow.Table) else frame.columns)] == [
        "text", "r", *(f"r.{name}" for name in Review.model_fields),
    ]  # fmt: skip
    stars = frame["r.stars"]
    assert (stars.to_pylist() if hasattr(stars, "to_pylist") else stars.to_list()) == [4, 4]


@pytest.mark.parametrize("options", [{}, {"json_schema": '{"type": "string"}'}, {"choices": ["a"]}])
def test_a_schema_without_fields_is_refused(options: Any, tmp_path: Path) -> None:
    plain = Pipeline("{{ text }}", model="m", **options)
    with pytest.raises(DatasetError, match="need a JSON schema of an object with properties"):
        plain.run(
            ROWS, out=tmp_path / "out.jsonl", producer=Producer("redis://127.0.0.1:1"), schema_columns=True
        )


def test_a_column_that_is_taken_is_refused(producer: Producer, tmp_path: Path) -> None:
    rows = [{"text": "a", "output.label": "x"}]
    with pytest.raises(DatasetError, match=r"a column 'output\.label' already"):
        pipeline().run(rows, out=tmp_path / "out.jsonl", producer=producer, schema_columns=True)


def test_types_of_fields() -> None:
    fields = {
        "a": {"type": ["string", "null"]}, "b": {"enum": ["x", "y"]}, "c": {"enum": [1, "x"]}, "d": {"const": "x"},
        "e": {"anyOf": [{"type": "integer"}, {"type": "string"}]}, "f": {}, "g": True, "h": {"type": "object"},
    }  # fmt: skip
    kinds = {"a": "string", "b": "string", "c": "", "d": "string", "e": "", "f": "", "g": "", "h": ""}
    assert schema_fields(json.dumps({"properties": fields})) == kinds
    behind = {"$ref": "#/$defs/Node", "$defs": {"Node": {"properties": {"n": {"type": "integer"}}}}}
    assert schema_fields(json.dumps(behind)) == {"n": "integer"}


def test_the_report_shows_some_rows(producer: Producer, tmp_path: Path) -> None:
    rows = [{"text": "<script>x" + "y" * 500}, {"text": "b"}]
    summary = pipeline().run(rows, out=tmp_path / "out.jsonl", producer=producer)
    assert [sample["row"] for sample in summary.as_json()["samples"]] == [1, 2]
    page = tmp_path / "report.html"
    report.write_html(summary, page, {"input": "in", "output": "out", "model": "m"})
    text = page.read_text()
    assert "Some rows" in text
    assert "&lt;script&gt;x" in text
    assert "<script>" not in text
    assert "y" * 400 not in text
    assert json.loads(json.dumps(summary.as_json()))["samples"][1]["input"] == {"text": "b"}


def test_samples_are_few_short_and_from_everywhere() -> None:
    summary = Summary()
    for number in range(1, 1_001):
        row = Row(number, {"text": "x" * 1_000, "_pagemill": {"key": "k"}})
        summary.add_sample(row, {"a": 1})
        summary.add_success({"outputs": [{}]}, "x", None, is_merged=False)
    numbers = [sample["row"] for sample in summary.samples]
    assert len(numbers) == SAMPLES
    assert numbers == sorted(numbers)
    assert max(numbers) > 500
    assert len(summary.samples[0]["input"]["text"]) == MAX_SAMPLE_CHARACTERS + 3
    assert list(summary.samples[0]["input"]) == ["text"]
