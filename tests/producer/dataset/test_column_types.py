"""Every Arrow type and every JSON value, through the readers and into every output: no cell affects another row."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pandas
import polars
import pyarrow
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.frames import source_of
from pagemill.producer.dataset.tables.column_types import fitted
from pagemill.producer.dataset.tables.rows import MemorySource, Row, _holds_rows, open_source
from pagemill.producer.dataset.tables.writers import META, Form
from tests.conftest import run_python

INTEGERS = st.one_of(st.integers(-(2**63), 2**63 - 1), st.integers(-(10**9), 10**9), st.integers(-3, 3))
BITS_32 = [
    pyarrow.int32(), pyarrow.uint32(), pyarrow.date32(), pyarrow.time32("s"), pyarrow.time32("ms"),
    pyarrow.float32(),
]  # fmt: skip
UNITS = ("s", "ms", "us", "ns")
BITS_64 = [
    pyarrow.int64(), pyarrow.uint64(), pyarrow.float64(), pyarrow.date64(), pyarrow.time64("us"), pyarrow.time64("ns"),
    *(pyarrow.timestamp(unit, zone) for unit in UNITS for zone in (None, "UTC", "Asia/Kolkata")),
    *(pyarrow.duration(unit) for unit in UNITS),
]  # fmt: skip
OTHERS = [
    pyarrow.null(), pyarrow.bool_(), pyarrow.int8(), pyarrow.uint16(), pyarrow.float16(), pyarrow.decimal128(38, 9),
    pyarrow.decimal256(60, -3), pyarrow.month_day_nano_interval(), pyarrow.binary(3), pyarrow.uuid(),
]  # fmt: skip
BYTES = {
    pyarrow.binary(): pyarrow.binary(),
    pyarrow.binary_view(): pyarrow.binary_view(),
    pyarrow.string(): pyarrow.binary(),
    pyarrow.large_string(): pyarrow.large_binary(),
    pyarrow.string_view(): pyarrow.binary_view(),
}
"""Types of texts and bytes, and the types whose arrays have the same layout."""


def leaf(kind: Any, size: int, draw: Any) -> Any:
    """Return an array with arbitrary bits, also bits that no Python value represents."""
    many = st.lists(st.none() | INTEGERS, min_size=size, max_size=size)
    if kind in BITS_32:
        ints = [None if value is None else (value + 2**31) % 2**32 - 2**31 for value in draw(many)]
        return pyarrow.array(ints, pyarrow.int32()).view(kind)
    if kind in BITS_64:
        return pyarrow.array(draw(many), pyarrow.int64()).view(kind)
    if kind in BYTES:
        cells = draw(st.lists(st.none() | st.binary(max_size=4), min_size=size, max_size=size))
        return pyarrow.array(cells, BYTES[kind]).view(kind)
    examples: dict[Any, list[Any]] = {
        pyarrow.bool_(): [True], pyarrow.int8(): [-5], pyarrow.uint16(): [7], pyarrow.float16(): [1.5, float("nan")],
        pyarrow.decimal128(38, 9): [1], pyarrow.decimal256(60, -3): [1000], pyarrow.binary(3): [b"\xff\x00a"],
        pyarrow.month_day_nano_interval(): [(1, 2, 3)], pyarrow.uuid(): [b"0123456789abcdef"],
    }  # fmt: skip
    choice = st.sampled_from([None, *examples.get(kind, [])])
    return pyarrow.array(draw(st.lists(choice, min_size=size, max_size=size)), kind)


@st.composite
def arrays(draw: Any, size: int, depth: int = 2) -> Any:
    shape = draw(st.sampled_from(["leaf"] * 3 + (["list", "struct", "map", "dictionary"] if depth else [])))
    if shape == "leaf":
        return leaf(draw(st.sampled_from([*BITS_32, *BITS_64, *OTHERS, *BYTES])), size, draw)
    inner = draw(arrays(size, depth - 1))
    if shape == "struct":
        names = draw(st.sampled_from([["a", "b"], ["a", "a"], ["items", ""], []]))
        if not names:
            return pyarrow.array([{}] * size, pyarrow.struct([]))
        return pyarrow.StructArray.from_arrays([inner, draw(arrays(size, depth - 1))], names)
    if shape == "dictionary":
        if not pyarrow.types.is_primitive(inner.type):
            return inner
        return pyarrow.DictionaryArray.from_arrays(pyarrow.array([size - 1] * size, pyarrow.int8()), inner)
    offsets = pyarrow.array(range(size + 1), pyarrow.int32())
    if shape == "map":
        keys = pyarrow.array([str(index) for index in range(size)])
        return pyarrow.MapArray.from_arrays(offsets, keys, inner)
    return pyarrow.ListArray.from_arrays(offsets, inner)


@st.composite
def tables(draw: Any) -> Any:
    size = draw(st.integers(1, 3))
    columns = draw(st.lists(arrays(size), min_size=1, max_size=2))
    return pyarrow.table({f"c{index}": column for index, column in enumerate(columns)})


def is_readable(column: Any, index: int) -> bool:
    try:
        column[index].as_py()
    except Exception:
        return False
    return True


def written(path: Path, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Write rows with an output, and read them back."""
    meta = {"key": "k", "row": 1, "finish_reason": "stop", "usage": {"prompt_tokens": 1}}
    with Form.from_path(path, rows).open(path) as writer:
        for row in rows:
            writer.write({**row, "output": "o", META: meta})
    return [row.fields or {} for row in open_source(path).rows()]


def check_rows(found: list[Row], table: Any) -> None:
    assert [row.number for row in found] == list(range(1, table.num_rows + 1))
    for index, row in enumerate(found):
        assert (row.fields is None) != (row.error is None)
        if all(is_readable(column, index) for column in table.columns):
            assert row.error is None
        if row.error is not None:
            assert "column 'c" in row.error.message
    json.dumps([row.fields for row in found], allow_nan=False)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(table=tables())
def test_any_arrow_table_gives_all_rows(table: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("rows")
    with pyarrow.ipc.new_file(folder / "in.arrow", table.schema) as file:
        file.write_table(table)
    found = list(open_source(folder / "in.arrow").rows())
    check_rows(found, table)
    check_rows(list(source_of(table).rows()), table)
    good = [row.fields for row in found if row.fields is not None]
    for name in ("out.parquet", "out.csv", "out.jsonl") if good else ():
        assert len(written(folder / name, good)) == len(good)


FAR = pyarrow.array([1, 2**31 - 1, 3], pyarrow.int32()).view(pyarrow.date32())
BAD_TEXT = pyarrow.array([b"a", b"\xff", b"c"]).view(pyarrow.string())
ONE_BAD_CELL = {
    "date": FAR,
    "timestamp": pyarrow.array([1, 2**62, 3]).view(pyarrow.timestamp("us")),
    "seconds": pyarrow.array([1, 2**62, 3]).view(pyarrow.timestamp("s", "UTC")),
    "duration": pyarrow.array([1, 2**62, 3]).view(pyarrow.duration("s")),
    "text": BAD_TEXT,
    "list": pyarrow.ListArray.from_arrays([0, 1, 2, 3], FAR),
    "struct": pyarrow.StructArray.from_arrays([BAD_TEXT], ["x"]),
    "dictionary": pyarrow.DictionaryArray.from_arrays([0, 1, 2], BAD_TEXT),
}


@pytest.mark.parametrize("name", ONE_BAD_CELL)
@pytest.mark.parametrize("suffix", [".parquet", ".arrow", "table"])
def test_a_cell_without_a_value_is_one_bad_row(name: str, suffix: str, tmp_path: Path) -> None:
    table = pyarrow.table({"id": [1, 2, 3], "odd": ONE_BAD_CELL[name]})
    path = tmp_path / f"in{suffix}"
    if suffix == ".parquet":
        if name in ("seconds", "dictionary"):
            pytest.skip(
                "Parquet has no seconds, and its reader refuses a dictionary of other bytes than UTF-8"
            )
        parquet.write_table(table, path)
    elif suffix == ".arrow":
        with pyarrow.ipc.new_stream(path, table.schema) as stream:
            stream.write_table(table)
    rows = list((source_of(table) if suffix == "table" else open_source(path)).rows())
    assert [(row.number, row.error is None) for row in rows] == [(1, True), (2, False), (3, True)]
    assert rows[1].error is not None
    is_text = name in ("text", "struct", "dictionary")
    assert rows[1].error.code == ("invalid_encoding" if is_text else "invalid_row")
    assert "column 'odd'" in rows[1].error.message
    assert rows[1].error.raw == '{"id": 2}'


@pytest.mark.parametrize("library", ["polars", "pandas"])
def test_a_frames_cell_without_a_value_is_one_bad_row(library: str) -> None:
    table = pyarrow.table({"id": [1, 2, 3], "odd": FAR})
    frame = (
        polars.from_arrow(table) if library == "polars" else table.to_pandas(types_mapper=pandas.ArrowDtype)
    )
    rows = list(source_of(frame).rows())
    assert [(row.number, row.error is None) for row in rows] == [(1, True), (2, False), (3, True)]


NANOSECONDS = """
import json, sys
class NoPandas:
    def find_spec(self, name, path, target=None):
        if name.partition(".")[0] == "pandas":
            raise ModuleNotFoundError(name)
if sys.argv[1] == "without":
    sys.meta_path.insert(0, NoPandas())
import pyarrow
from pagemill.producer.dataset.frames import source_of
times = pyarrow.array([1_700_000_000_123_456_789, None, -1]).view(pyarrow.timestamp("ns"))
columns = {
    "plain": times,
    "zone": times.view(pyarrow.timestamp("ns", "Asia/Kolkata")),
    "duration": pyarrow.array([1_500_000_001, None, 5]).view(pyarrow.duration("ns")),
    "time": pyarrow.array([3_600_000_000_001, None, 5]).view(pyarrow.time64("ns")),
    "list": pyarrow.ListArray.from_arrays([0, 1, 2, 3], times),
    "nested times": pyarrow.array([[3_600_000_000_001], None, [5]]).cast(pyarrow.list_(pyarrow.time64("ns"))),
    "map": pyarrow.MapArray.from_arrays([0, 1, 2, 3], pyarrow.array(["a", "b", "c"]), times),
    "struct": pyarrow.StructArray.from_arrays([times], ["x"]),
    "dictionary": pyarrow.DictionaryArray.from_arrays([0, 1, 2], times),
    "runs": pyarrow.RunEndEncodedArray.from_arrays([1, 2, 3], times),
}
print(json.dumps([row.fields for row in source_of(pyarrow.table(columns)).rows()]))
assert ("pandas" in sys.modules) == (sys.argv[1] == "with")
"""


@pytest.mark.slow
def test_nanoseconds_are_the_same_without_pandas() -> None:
    """Pandas has types for them, Python does not."""
    told = [run_python("-c", NANOSECONDS, how, check=True).stdout for how in ("with", "without")]
    assert told[0] == told[1]
    assert "2023-11-14T22:13:20.123456789" in told[0]
    assert "01:00:00.000000001" in told[0]
    rows = json.loads(told[0])
    assert rows[1]["nested times"] is None
    assert [row["nested times"] for row in rows[::2]] == [["01:00:00.000000001"], ["00:00:00.000000005"]]


def test_an_unknown_time_zone_is_named(tmp_path: Path) -> None:
    table = pyarrow.table({"at": pyarrow.array([1]).cast(pyarrow.timestamp("us", tz="Mars/Olympus"))})
    parquet.write_table(table, tmp_path / "in.parquet")
    (row,) = open_source(tmp_path / "in.parquet").rows()
    assert row.error is not None
    assert (
        row.error.message
        == "column 'at': unknown time zone 'Mars/Olympus'; install tzdata, or convert the column to UTC"
    )


def test_columns_that_appear_twice_are_refused(tmp_path: Path) -> None:
    table = pyarrow.Table.from_arrays([pyarrow.array([1]), pyarrow.array([2])], ["a", "a"])
    with pyarrow.ipc.new_stream(tmp_path / "in.arrow", table.schema) as stream:
        stream.write_table(table)
    with pytest.raises(DatasetError, match="columns appear twice: a"):
        list(open_source(tmp_path / "in.arrow").rows())


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3),
    max_leaves=6,
)  # fmt: skip
NAMES = st.text(st.characters(codec="utf-8"), max_size=3).filter(lambda name: name != META)


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(rows=st.lists(st.dictionaries(NAMES, VALUES, max_size=3), min_size=1, max_size=4))
def test_any_json_rows_fit_any_output(
    rows: list[dict[str, Any]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("rows")
    good = [row.fields for row in MemorySource(rows).rows() if row.fields is not None]
    texts = [value for row in good for value in row.values() if isinstance(value, str)]
    for name in ("out.parquet", "out.csv", "out.tsv", "out.jsonl"):
        if name == "out.tsv" and any(map(_holds_rows, texts)):
            continue  # its reader treats them as rows that a stray quote joined
        found = written(folder / name, good)
        assert len(found) == len(good)
        assert all(row.keys() <= line.keys() for row, line in zip(good, found, strict=True))


DEEP = "[" * 40 + "1" + "]" * 40


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ([1, "x2", 3], ["1", "x2", "3"]),
        ([1, 2**63 + 5, 3], [1, 2**63 + 5, 3]),
        ([1, 2**64 + 7, -3], ["1", str(2**64 + 7), "-3"]),
        ([2**60 + 1, 0.5], [str(2**60 + 1), "0.5"]),
        ([1, 0.5], [1.0, 0.5]),
        ([{}, {}], ["{}", "{}"]),
        ([{"a": {}}, None], ['{"a": {}}', None]),
        ([{}, {"a": 1}], [{"a": None}, {"a": 1}]),
        ([[1, "s"], ["t"]], ['[1, "s"]', '["t"]']),
        ([[["k", 1]], [["k", 2]]], ['[["k", 1]]', '[["k", 2]]']),
        ([True, 1], ["true", "1"]),
        ([[], None], [[], None]),
        ([json.loads(DEEP)], [DEEP]),
    ],
)  # fmt: skip
def test_parquet_columns_hold_all_their_values(
    values: list[Any], expected: list[Any], tmp_path: Path
) -> None:
    rows = [{"a": value} for value in values]
    assert [line["a"] for line in written(tmp_path / "out.parquet", rows)] == expected


def test_csv_has_the_columns_of_all_rows(tmp_path: Path) -> None:
    written(tmp_path / "out.csv", [{"a": 1}, {"b": 2, "a": 3}])
    header, *lines = csv.reader((tmp_path / "out.csv").read_text().splitlines())
    assert header == ["a", "b", "output", META]
    assert [line[:3] for line in lines] == [["1", "", "o"], ["3", "2", "o"]]


@pytest.mark.parametrize(
    ("value", "kind", "expected"),
    [
        (2**70, "integer", None), (5.0, "integer", 5), ("five", "integer", None), (True, "integer", None),
        (2**60 + 1, "number", float(2**60 + 1)), (10**400, "number", None), (1, "boolean", None), ({}, "string", None),
        (None, "string", None), (0.25, "probability", 0.25),
    ],
)  # fmt: skip
def test_values_of_schema_columns_fit_their_type(value: Any, kind: str, expected: Any) -> None:
    assert fitted(value, kind) == expected
