"""CSV and TSV as users write it: every line is in a row, or in an error with its number."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill import Producer
from pagemill.cli.terminal.checked import Delimiter, checked
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.tables.rows import CsvSource, Row, open_source
from tests.producer.scripted_worker import scripted_worker


def read(folder: Path, name: str, text: str | bytes, **options: Any) -> list[Row]:
    path = folder / name
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return list(open_source(path, **options).rows())


def lines_of(row: Row) -> int:
    """Return the number of lines of the file that a row represents."""
    if row.fields is not None:
        return 1 + sum(value.count("\n") for value in row.fields.values())
    assert row.error is not None
    assert row.error.raw
    place = re.match(r"lines? (\d+)(?: to (\d+))?: ", row.error.message)
    assert place is not None
    return int(place[2] or place[1]) - int(place[1]) + 1


CELL = st.lists(st.sampled_from(['"', '""', "a", " ", "'", "é"]), max_size=4).map("".join)
LINES = st.lists(st.lists(CELL, min_size=1, max_size=3), max_size=8)


@pytest.mark.slow
@settings(max_examples=500, deadline=None)
@given(lines=LINES, delimiter=st.sampled_from(",\t;"), end=st.sampled_from(["\n", "\r\n"]))
def test_every_line_is_accounted_for(
    lines: list[list[str]], delimiter: str, end: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # No line starts with a quote, so that no line is blank.
    text = "".join(delimiter.join(["x", *cells]) + end for cells in [["y", "z"], *lines])
    folder = tmp_path_factory.mktemp("rows")
    rows = read(folder, "in.csv", text, delimiter=delimiter)
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert sum(map(lines_of, rows)) == len(lines)
    plain = read(folder, "in.csv", text, delimiter=delimiter, quoting="none")
    assert [row.number for row in plain] == list(range(1, len(lines) + 1))
    for row, cells in zip(plain, lines, strict=True):
        is_row = len(cells) >= 2 and not any(cells[2:])
        assert (row.fields and list(row.fields.values())) == (["x", *cells[:2]] if is_row else None)


HEAD = "id\ttext\n1\tfine\n"


@pytest.mark.parametrize(
    ("text", "codes", "says"),
    [
        ('2\t"opens\n3\tthird\n4\tfourth\n', [2], "line 3: a quote that opens here is not closed"),
        (
            '2\t"opens\n3\tthird\n4\tcloses"\n5\tfifth\n',
            [2],
            "line 3: a quote that opens here closes in line 5",
        ),
        ('2\t"opens\r\n3\tthird\r\n4\tcloses"\r\n', [2], "line 3: a quote that opens here closes in line 5"),
        ('2\t"whole" then more\n3\tthird\n', [2], "line 3: "),
        ('2\t"opens\n3\t"closes" and more\n4\tfourth\n', [2, 3], "line 3: "),
        ("2\n3\tthird\n", [2], "line 3: the row has 1 fields, the header 2"),
    ],
)
def test_a_stray_quote_costs_its_own_line(text: str, codes: list[int], says: str, tmp_path: Path) -> None:
    rows = read(tmp_path, "in.tsv", HEAD + text)
    assert len(rows) == 1 + text.count("\n")
    assert [row.number for row in rows if row.error is not None] == codes
    (first, *_) = [row.error for row in rows if row.error is not None]
    assert first.code == "invalid_csv"
    assert first.message.startswith(says)
    assert "--quoting none" in first.message or "fields" in first.message
    assert first.raw == (HEAD + text).splitlines()[codes[0]]


def test_quoted_line_breaks_are_counted(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('text,n\n"a\nb",1\nc,2\n"d, e\n\nf",3\n')
    source = open_source(path)
    assert isinstance(source, CsvSource)
    assert source.count() == 3
    assert (source.joined.count, source.joined.first, source.joined.last) == (2, 2, 3)


def test_joined_rows_that_fail_are_reported_too(tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('id,text\n1,"opens\n2,second\n3,closes",more\n4,fourth\n')
    source = open_source(path)
    assert [row.error is None for row in source.rows()] == [False, True]
    assert isinstance(source, CsvSource)
    assert (source.joined.count, source.joined.first, source.joined.last) == (1, 2, 4)


def test_a_run_reports_rows_that_quotes_join(queue: Any, tmp_path: Path) -> None:
    path = tmp_path / "in.csv"
    path.write_text('id,text\n1,"opens\n2,second\n3,closes"\n4,fourth\n')
    notices: list[str] = []
    with scripted_worker(queue.url, queue.name), Producer(queue.url, queue=queue.name) as producer:
        recipe = Pipeline("{{ text }}", model="m", chat=False).recipe
        run = DatasetRun(open_source(path), tmp_path / "out.jsonl", recipe)
        run.on_notice = lambda message, is_endless: notices.append(message)
        run.execute(producer)
    (notice,) = notices
    assert "in.csv: 1 row has several lines, joined by quotes (first: lines 2 to 4)" in notice
    assert "--quoting none" in notice


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.csv", "id,text,,\n1,one,,\n2,two,,\n", [["1", "one"], ["2", "two"]]),
        ("a.csv", "id,text\n1,one,,\n2,two\n", [["1", "one"], ["2", "two"]]),
        ("a.csv", ",text\n0,one\n", [["0", "one"]]),
        ("a.csv", "\n\nid,text\n1,one\n", [["1", "one"]]),
        ("a.csv", "id,text,,\n1,one,,lost\n", [None]),
        ("a.csv", "id\n1\n", [["1"]]),
    ],
)
def test_spare_delimiters(name: str, text: str, expected: list[Any], tmp_path: Path) -> None:
    assert [row.fields and list(row.fields.values()) for row in read(tmp_path, name, text)] == expected


@pytest.mark.parametrize(
    ("name", "data", "says"),
    [
        ("a.csv", b"id;text\n1;a\n", 'one column.*--delimiter ";"'),
        ("a.csv", b"id\ttext\n1\ta\n", r'one column.*--delimiter "\\t"'),
        ("a.tsv", b"id,text\n1,a\n", 'one column.*--delimiter ","'),
        ("a.csv", b",a,,b\n1,2,3,4\n", "no name for column 3"),
        ("a.csv", b"a,b,a\n", "columns appear twice: a"),
        (
            "a.csv",
            "näme,b\n1,2\n".encode("latin-1"),
            "header line is not utf-8 text; name the file's --encoding",
        ),
        ("a.csv", "id,text\n1,a\n".encode("utf-16"), "utf-16 text: add --encoding utf-16"),
        ("a.csv", "id,text\n1,a\n".encode("utf-16-le"), "add --encoding utf-16-le"),
        ("a.tsv", "id\ttext\n1\ta\n".encode("utf-16-be"), "add --encoding utf-16-be"),
        ("a.csv", "id,text\n1,a\n".encode("utf-32"), "add --encoding utf-32"),
        ("a.jsonl", '{"text": "a"}\n'.encode("utf-16"), "utf-16 text; convert it to UTF-8"),
        ("a.csv", gzip.compress(b"id,text\n1,a\n", mtime=0), "gzip data, not text; decompress it first"),
        ("a.jsonl", gzip.compress(b'{"text": "a"}\n', mtime=0), "gzip data, not text; decompress it first"),
        ("a.jsonl", b"\x28\xb5\x2f\xfd\x04", "Zstandard data"),
        ("a.csv", bz2.compress(b"id,text\n1,a\n"), "bzip2 data, not text"),
        ("a.jsonl", lzma.compress(b'{"text": "a"}\n'), "xz data, not text"),
        ("a.csv", b"PK\x03\x04\x14\x00a.csvtext\na\n", "ZIP or Excel data"),
        ("a.json", b'[{"text": "a"}, {"text": "b"}]', "one JSON value.*jq"),
        ("a.json", b'\n[\n  {"text": "a"}\n]\n', "one JSON value.*jq"),
        ("a.json", b'{\n  "text": "a"\n}\n', "one JSON value.*jq"),
    ],
)
def test_a_file_of_another_form_is_refused_with_a_hint(
    name: str, data: bytes, says: str, tmp_path: Path
) -> None:
    with pytest.raises(DatasetError, match=says):
        read(tmp_path, name, data)


@pytest.mark.parametrize("encoding", ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-8", "latin-1"])
def test_a_named_encoding_is_read(encoding: str, tmp_path: Path) -> None:
    rows = read(tmp_path, "a.csv", "id,text\n1,é\n".encode(encoding), encoding=encoding)
    assert [row.fields for row in rows] == [{"id": "1", "text": "é"}]


def test_torn_utf_16_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="not utf-16 text"):
        read(tmp_path, "a.csv", "id,text\n1,é\n".encode("utf-16")[:-1], encoding="utf-16")


def test_a_bad_first_line_of_json_lines_is_one_bad_row(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.jsonl", '[1, 2]\n{"a": 1}\n')
    assert [row.error is None for row in rows] == [False, True]


def test_a_delimiter_may_be_named(tmp_path: Path) -> None:
    rows = read(tmp_path, "a.csv", "id;text\n1;two, and more\n", delimiter=";")
    assert rows[0].fields == {"id": "1", "text": "two, and more"}
    assert read(tmp_path, "b.csv", "a;b\n1\n", delimiter=",")[0].fields == {"a;b": "1"}
    with pytest.raises(DatasetError, match="--delimiter is only for CSV"):
        read(tmp_path, "a.jsonl", json.dumps({"a": 1}), delimiter=";")
    with pytest.raises(DatasetError, match="--quoting is only for CSV"):
        read(tmp_path, "a.jsonl", json.dumps({"a": 1}), quoting="none")


@pytest.mark.parametrize("given", [";", "|", "\\t", "tab", "\t", "^"])
def test_delimiters_on_the_command_line(given: str) -> None:
    assert checked(Delimiter)(given) in (given, "\t")


@pytest.mark.parametrize("given", ["", ";;", '"', "a", "1", "\n", " "])
def test_bad_delimiters_on_the_command_line(given: str) -> None:
    with pytest.raises(Exception, match="should be one character"):
        checked(Delimiter)(given)
