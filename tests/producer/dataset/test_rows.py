"""Reading rows: every format, and every kind of bad line."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterator
from decimal import Decimal
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from pyarrow import parquet

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.tables import rows as rows_module
from pagemill.producer.dataset.tables.rows import MemorySource, Row, open_source

TABLE = [{"text": "one", "n": 1}, {"text": "zwei ✓", "n": None}, {"text": "", "n": 3}]


def read(path: Path, **options: str) -> list[Row]:
    return list(open_source(path, **options).rows())  # type: ignore[arg-type]


def write(path: Path, data: str | bytes) -> Path:
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


def codes(rows: list[Row]) -> list[str | None]:
    return [row.error.code if row.error else None for row in rows]


def test_json_lines(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", "\n".join(map(json.dumps, TABLE)))
    assert [row.fields for row in read(path)] == TABLE
    assert [row.number for row in read(path)] == [1, 2, 3]
    assert open_source(path).count() == 3


def test_bad_json_lines_keep_their_numbers(tmp_path: Path) -> None:
    lines = [
        b'{"a": 1}', b"", b"{broken", b"[1, 2]", b'{"a": NaN}', b'{"a": "\xff"}', b'{"a": "\\ud800"}', b"7",
    ]  # fmt: skip
    path = write(tmp_path / "in.jsonl", b"\xef\xbb\xbf" + b"\n".join(lines))
    rows = read(path)
    assert codes(rows) == [
        None, "invalid_json", "invalid_row", "invalid_json", "invalid_encoding", "invalid_row", "invalid_row",
    ]  # fmt: skip
    assert [row.number for row in rows] == list(range(1, 8))
    assert rows[1].error is not None
    assert rows[1].error.raw == "{broken"
    assert open_source(path).count() == 7


def test_a_number_beyond_64_bits_is_kept_as_text(tmp_path: Path) -> None:
    """As null it would silently become a field's default; no field accepts text as a number."""
    path = write(tmp_path / "in.jsonl", '{"a": 1e400, "b": [-1e999], "c": 1e308, "d": 1e-999}\n')
    assert read(path)[0].fields == {"a": "1e400", "b": ["-1e999"], "c": 1e308, "d": 0.0}


def test_json_nested_too_deep_is_one_bad_row(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.jsonl", "[" * 100_000 + "\n" + '{"a":' * 100 + "1" + "}" * 100 + '\n{"a": 1}\n'
    )
    assert codes(read(path))[-1] is None
    assert all(code is not None for code in codes(read(path))[:-1])


def test_a_line_that_is_too_long_is_skipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 64)
    path = write(tmp_path / "in.jsonl", '{"a": 1}\n{"a": "' + "x" * 1000 + '"}\n{"a": 2}\n')
    assert codes(read(path)) == [None, "payload_too_large", None]
    assert open_source(path).count() == 3


def test_a_csv_line_that_is_too_long_is_no_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is never read completely. A long line within quotes is a separate row, like all lines after an open quote."""
    monkeypatch.setattr(rows_module, "MAX_LINE_BYTES", 64)
    long = "b," * 500 + "\r\n"
    path = write(tmp_path / "in.csv", f'a,b\r\n1,2\r\n{long}"3\r\n{long}4,5\r\n')
    rows = read(path)
    assert codes(rows) == [None, "invalid_csv", "invalid_csv", "invalid_csv", None]
    messages = [row.error.message for row in rows if row.error is not None]
    assert messages == [
        "line 3: the line is longer than 64 MiB",
        "line 4: a quote that opens here is not closed; if quotes are text, add --quoting none",
        "line 5: the line is longer than 64 MiB",
    ]
    assert rows[-1].fields == {"a": "4", "b": "5"}


def test_other_encodings(tmp_path: Path) -> None:
    path = write(tmp_path / "in.jsonl", json.dumps({"a": "café"}, ensure_ascii=False).encode("latin-1"))
    assert codes(read(path)) == ["invalid_encoding"]
    assert read(path, encoding="latin-1")[0].fields == {"a": "café"}
    with pytest.raises(DatasetError, match="convert"):
        open_source(path, encoding="utf-16")
    with pytest.raises(DatasetError, match="encoding"):
        open_source(path, encoding="klingon")


def test_csv(tmp_path: Path) -> None:
    path = write(
        tmp_path / "in.csv", '\ufefftext,n\n"one, ""quoted""\nline",1\nshort\n\ntwo,2,3\n"three",3\n'
    )
    rows = read(path)
    assert codes(rows) == [None, "invalid_csv", "invalid_csv", None]
    assert rows[0].fields == {"text": 'one, "quoted"\nline', "n": "1"}
    assert open_source(path).count() == 4


def test_csv_with_bytes_that_are_no_text(tmp_path: Path) -> None:
    path = write(tmp_path / "in.csv", b"text\nfine\nna\xefve\nfine\n")
    assert codes(read(path)) == [None, "invalid_encoding", None]


def test_csv_without_a_usable_header(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="empty"):
        read(write(tmp_path / "empty.csv", ""))
    with pytest.raises(DatasetError, match="twice: a"):
        read(write(tmp_path / "twice.csv", "a,b,a\n1,2,3\n"))


def test_tsv(tmp_path: Path) -> None:
    assert read(write(tmp_path / "in.tsv", "a\tb\n1,5\t2\n"))[0].fields == {"a": "1,5", "b": "2"}


def test_parquet_values_become_json(tmp_path: Path) -> None:
    path = tmp_path / "in.parquet"
    columns = {
        "day": [datetime.date(2026, 1, 2)] * 3,
        "raw": [b"\x00\x01", None, b""],
        "price": [Decimal("1.50"), None, Decimal("2.00")],
        "ratio": [0.5, float("nan"), None],
        "tags": [["a"], [], None],
    }
    parquet.write_table(pyarrow.table(columns), path)
    rows = read(path)
    assert rows[0].fields == {
        "day": "2026-01-02",
        "raw": "AAE=",
        "price": "1.50",
        "ratio": 0.5,
        "tags": ["a"],
    }
    assert rows[1].fields is not None
    assert rows[1].fields["ratio"] is None
    assert open_source(path).count() == 3


def test_a_dataset_directory(tmp_path: Path) -> None:
    """The layout that `datasets` writes: Arrow streams and a state.json that lists them."""
    table = pyarrow.Table.from_pylist(TABLE)
    for number in range(2):
        with pyarrow.ipc.new_stream(tmp_path / f"data-{number}.arrow", table.schema) as stream:
            stream.write_table(table)
    files = [{"filename": f"data-{number}.arrow"} for number in range(2)]
    (tmp_path / "state.json").write_text(json.dumps({"_data_files": files}))
    assert [row.fields for row in read(tmp_path)] == TABLE + TABLE
    assert open_source(tmp_path).count() == 6


def test_a_directory_of_splits_asks_for_one(tmp_path: Path) -> None:
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    with pytest.raises(DatasetError, match="train"):
        open_source(tmp_path)


@pytest.mark.parametrize("name", ["no-such.jsonl", "odd.xyz", "torn.parquet"])
def test_a_file_that_cannot_be_used_says_so(tmp_path: Path, name: str) -> None:
    if not name.startswith("no"):
        write(tmp_path / name, b"PAR1 but not really")
    with pytest.raises(DatasetError, match=name):
        read(tmp_path / name)


class Odd:
    """A value of a library that fails in each of its conversions."""

    ndim = 1

    def __iter__(self) -> Iterator[int]:
        raise OverflowError("too far")

    def __repr__(self) -> str:
        raise RuntimeError("not printable")


@pytest.mark.parametrize("kind", ["huge", "negative", "list", "object", "odd"])
def test_a_value_that_nothing_can_print_is_one_bad_row(kind: str) -> None:
    values = {
        "huge": 10**5_000,
        "negative": -(10**5_000),
        "list": [10**5_000],
        "object": {"a": Odd()},
        "odd": Odd(),
    }
    value: Any = values[kind]
    rows = list(MemorySource([{"a": 1}, {"a": value}, {"a": 2}]).rows())
    assert codes(rows) == [None, "invalid_row", None]
    assert rows[1].error is not None
    assert rows[1].error.message


def test_rows_from_python(tmp_path: Path) -> None:
    source = MemorySource([{"a": 1}, 7, {"a": object()}, {1: 2}])  # type: ignore[list-item,dict-item]
    assert codes(list(source.rows())) == [None, "invalid_row", "invalid_row", "invalid_row"]
    assert source.is_repeatable
    assert not MemorySource(iter([{"a": 1}])).is_repeatable
