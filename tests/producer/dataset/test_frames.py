"""Data frames as input and output of a dataset run: pandas, polars and Arrow tables, with realistic content."""

from __future__ import annotations

import datetime
import decimal
import json
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pandas
import polars
import pyarrow
import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.frames import source_of
from pagemill.producer.dataset.pipeline import Pipeline
from tests.producer.scripted_worker import scripted_worker

Make = Callable[[dict[str, list[Any]]], Any]
MAKERS: dict[str, Make] = {"pandas": pandas.DataFrame, "polars": polars.DataFrame, "arrow": pyarrow.table}


@pytest.fixture(params=MAKERS, ids=str)
def make(request: pytest.FixtureRequest) -> Make:
    return MAKERS[request.param]


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name):
        yield producer


def simple(template: str = "{{ text }}", **options: Any) -> Pipeline:
    return Pipeline(template, model="m", chat=False, **options)


def column(frame: Any, name: str) -> list[Any]:
    values = frame[name].to_list() if hasattr(frame[name], "to_list") else frame[name].to_pylist()
    return [None if isinstance(value, float) and value != value else value for value in values]


def test_a_frame_comes_back_as_a_frame_of_its_kind(make: Make, producer: Producer) -> None:
    given = make({"text": ["a", "b", "fail c", "ü"], "n": [1, 2, 3, 4]})
    summary = simple().run(given, producer=producer, output_column="label")
    assert type(summary.frame) is type(given)
    assert column(summary.frame, "text") == ["a", "b", "fail c", "ü"]
    assert column(summary.frame, "n") == [1, 2, 3, 4]
    assert column(summary.frame, "label") == ["a", "b", None, "ü"]
    assert (summary.succeeded, summary.failed) == (3, 1)
    assert "label" not in (given.columns if hasattr(given, "columns") else given.column_names)


def test_a_frame_runs_into_a_file_too(make: Make, producer: Producer, tmp_path: Path) -> None:
    out = tmp_path / "out.jsonl"
    summary = simple().run(make({"text": ["a", "b"]}), out=out, producer=producer)
    assert [json.loads(line)["output"] for line in out.read_text().splitlines()] == ["a", "b"]
    assert column(summary.frame, "output") == ["a", "b"]


def test_a_trial_gives_back_the_rows_that_it_ran(make: Make, producer: Producer) -> None:
    summary = simple().run(make({"text": ["a", "b", "c"]}), producer=producer, limit=2)
    assert column(summary.frame, "output") == ["a", "b"]


def test_lists_and_arrays_are_values_like_others(make: Make, producer: Producer) -> None:
    rows = {"tags": [["x", "y"], [], None], "points": [[1.5, 2.0], [float("nan")], [3.0]]}
    summary = simple("{{ tags | tojson }} {{ points | tojson }}").run(make(rows), producer=producer)
    assert column(summary.frame, "output") == ['["x", "y"] [1.5, 2.0]', "[] [null]", "null [3.0]"]


def test_a_frame_without_rows_comes_back_with_its_column(make: Make, producer: Producer) -> None:
    given = make({"text": []})
    summary = simple().run(given, producer=producer)
    assert (summary.rows, column(summary.frame, "output")) == (0, [])
    assert type(summary.frame) is type(given)


def test_an_index_with_a_label_twice_is_kept(producer: Producer) -> None:
    given = pandas.DataFrame({"text": ["a", "b", "c"]}, index=["x", "x", "y"])
    found = simple().run(given, producer=producer).frame
    assert list(found.index) == ["x", "x", "y"]
    assert list(found["output"]) == ["a", "b", "c"]


MOMENT = datetime.datetime(2026, 11, 23, 3, 15)
CELLS = [
    (None, None), (float("nan"), None), (float("inf"), None), (numpy.float64("nan"), None),
    (numpy.float32(1.5), 1.5), (numpy.int64(2**40), 2**40), (numpy.bool_(True), True), (numpy.str_("ü"), "ü"),
    (pandas.NA, None), (pandas.NaT, None), (numpy.datetime64("NaT"), None),
    (pandas.Timestamp(MOMENT), "2026-11-23T03:15:00"), (pandas.Timedelta(minutes=1), 60.0),
    (numpy.datetime64("2026-11-23T03:15:00", "ns"), "2026-11-23T03:15:00.000000000"),
    (numpy.timedelta64(1500, "ms"), 1.5), (numpy.array([[1, 2], [3, 4]]), [[1, 2], [3, 4]]),
    (numpy.array(["a", None], dtype=object), ["a", None]), (numpy.array(7), 7),
    (pandas.Series([1, 2]), [1, 2]), (polars.Series([1, None]), [1, None]), (pyarrow.scalar(3), 3),
    (pyarrow.array([1, None]), [1, None]), ({"a": numpy.array([1.0])}, {"a": [1.0]}),
    (decimal.Decimal("1.10"), "1.10"), (decimal.Decimal("NaN"), None), (b"\x00\xff", "AP8="),
    (bytearray(b"a"), "YQ=="), (MOMENT.date(), "2026-11-23"), (datetime.timedelta(seconds=2), 2.0),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"), ("日本語", "日本語"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("value", "expected"), CELLS, ids=[f"{i}-{type(v).__name__}" for i, (v, _) in enumerate(CELLS)]
)
def test_a_cell_of_any_library_has_a_json_value(value: Any, expected: Any) -> None:
    (row,) = source_of([{"cell": value}]).rows()
    assert row.error is None, row.error
    assert row.fields == {"cell": expected}
    json.dumps(row.fields, allow_nan=False)


def test_mixed_types_in_one_column(producer: Producer) -> None:
    values = ["text", 3, 2.5, None, [1], {"a": 1}, MOMENT, b"x", decimal.Decimal(2)]
    given = pandas.DataFrame({"text": pandas.Series(values, dtype=object)})
    found = simple("{{ text | tojson }}").run(given, producer=producer, on_empty="label").frame
    assert list(found["output"]) == [
        '"text"', "3", "2.5", "null", "[1]", '{"a": 1}', '"2026-11-23T03:15:00"', '"eA=="', '"2"',
    ]  # fmt: skip


def test_one_odd_value_costs_its_own_row(producer: Producer) -> None:
    given = pandas.DataFrame({"text": ["a", "b"], "odd": pandas.Series([None, object()], dtype=object)})
    summary = simple().run(given, producer=producer)
    assert column(summary.frame, "output") == ["a", None]
    assert "value of type object" in (summary.first_failure or "")


def test_columns_that_no_row_can_have_are_refused() -> None:
    twice = pandas.DataFrame([["a", "b"]], columns=["text", "text"])
    with pytest.raises(DatasetError, match="columns appear twice: text"):
        simple().run(twice)
    with pytest.raises(DatasetError, match="columns appear twice: text"):
        simple().run(pyarrow.table([["a"], ["b"]], names=["text", "text"]))
    with pytest.raises(DatasetError, match=r"must be text, not 0; .*columns\.map\(str\)"):
        simple().run(pandas.DataFrame([["a"]]))


@pytest.mark.parametrize(
    ("rows", "says"),
    [
        ({"text": ["a", "b"]}, "a mapping is one row"),
        (7, "not int"),
        (b"text", "not bytes"),
        (["a", "b"], "a: no such file"),
        ([7, "b"], "none of the 2 rows makes a job; row 1: invalid_row: a row must be an object"),
        (pandas.Series(["a", "b"]), "none of the 2 rows makes a job"),
        ([{"other": 1}], "the columns are: other"),
    ],
)
def test_what_holds_no_rows_raises(rows: Any, says: str, producer: Producer, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=says):
        simple().run(rows, out=tmp_path / "out.jsonl", producer=producer)
    assert list(tmp_path.iterdir()) == []


def test_rows_without_a_frame_need_a_file() -> None:
    with pytest.raises(DatasetError, match="the output needs a file"):
        simple().run([{"text": "a"}])


def test_outputs_of_different_types_become_text(producer: Producer) -> None:
    for name in ("polars", "arrow"):
        source = source_of(MAKERS[name]({"text": ["a", "b"]}))
        found = source.frame.labeled([1, 0], {"output": [{"a": 1}, "x"]})  # type: ignore[attr-defined]
        assert column(found, "text") == ["b", "a"]
        assert column(found, "output") == ['{"a": 1}', "x"]


def test_a_row_too_large_for_the_queue_fails_alone(producer: Producer, tmp_path: Path) -> None:
    """The row itself is valid: only its payload is longer than a queue accepts."""
    summary = simple().run(pandas.DataFrame({"text": ["a", "x" * (1 << 20)]}), producer=producer)
    assert column(summary.frame, "output") == ["a", None]
    assert summary.error_codes == {"payload_too_large": 1}
