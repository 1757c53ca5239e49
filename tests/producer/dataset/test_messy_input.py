"""Unusual inputs: no row is lost, and what cannot be done is rejected before it costs anything."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas
import polars
import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.frames import source_of
from pagemill.producer.dataset.template import Condition, NullRendered, PromptTemplate
from pagemill.producer.dataset.work import TooManyErrors
from pagemill.producer.openai.batch_file import BatchFile
from tests.producer.dataset.test_run import lines, ran, simple, write_rows

__all__ = ["ran"]


class Reader:
    """An iterable over one file handle: it can be read once, and is not an iterator."""

    def __init__(self, count: int) -> None:
        self._rows = iter([{"text": f"t{i}"} for i in range(count)])

    def __iter__(self) -> Iterator[dict[str, str]]:
        yield from self._rows


def test_rows_that_can_be_read_once(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    summary = simple().run(Reader(50), out=tmp_path / "out.jsonl", producer=producer)
    assert (summary.rows, summary.succeeded) == (50, 50)
    assert [row["output"] for row in lines(tmp_path / "out.jsonl")] == [f"t{i}" for i in range(50)]


def test_a_smaller_limit_does_not_drop_finished_rows(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", [f"row {i}" for i in range(20)])
    run = {"out": tmp_path / "out.jsonl", "producer": producer}
    simple().run(source, **run, limit=20, is_trial=True)
    with pytest.raises(DatasetError, match="20 finished rows, and --limit 5 would drop some"):
        simple().run(source, **run, limit=5)
    assert simple().run(source, **run).succeeded == 20
    assert sum(ran.values()) == 20


@pytest.mark.parametrize(
    "source",
    [
        '{{ title ~ ": " ~ body }}', "{{ items | join(', ') }}", "{{ '%s' | format(title) }}", "{{ '%s' % title }}",
        "{{ '%s %s' % (body, title) }}", "{{ title | urlize }}", "{{ title | pprint }}", "{{ title | wordcount }}",
        "{{ parts | join(', ', attribute='name') }}",
    ],
)  # fmt: skip
def test_no_way_prints_a_null_as_a_word(source: str) -> None:
    fields = {"title": None, "body": "x", "items": [None, "x"], "parts": [{"name": None}, {"name": "x"}]}
    with pytest.raises(NullRendered):
        PromptTemplate(source).render(fields)
    assert "None" not in PromptTemplate(source, nulls_are_empty=True).render(fields)


def test_filters_without_nulls_are_unchanged() -> None:
    fields = {"n": 5, "body": "x", "parts": [{"name": "a"}, {"name": "b"}]}
    template = "{{ n % 2 }} {{ body ~ n }} {{ parts | join('-', 'name') }} {{ '%d %s' | format(n, body) }}"
    assert PromptTemplate(template).render(fields) == "1 x5 a-b 5 x"


def test_a_column_of_an_odd_name_can_be_empty() -> None:
    template = PromptTemplate('S: {{ row["review text"] }}')
    assert template.is_empty({"id": 1, "review text": ""})
    assert not template.is_empty({"id": 1, "review text": "x"})


def test_the_first_row_may_lack_a_column(producer: Producer, ran: Counter[str], tmp_path: Path) -> None:
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1}\n{"id": 2, "text": "x", "good": "x"}\n')
    summary = simple().run(source, out=tmp_path / "out.jsonl", producer=producer, gold="good")
    assert (summary.succeeded, summary.failed) == (1, 1)
    PromptTemplate('{{ text | default("none") }}').check_columns({"id": 1})
    Condition('lang is defined and lang == "de"').check_columns({"id": 1})
    with pytest.raises(DatasetError, match="asks for lang"):
        Condition('lang == "de"').check_columns({"id": 1})


def test_rows_that_cannot_be_read_count_as_errors(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a", "b"])
    source.write_text(source.read_text() + "not json\n" * 10)
    with pytest.raises(
        TooManyErrors, match="4 rows have failed, more than --max-errors 3; the last one: invalid_json"
    ):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer, max_errors=3)
    assert simple().run(source, out=tmp_path / "out.jsonl", producer=producer, max_errors=10).failed == 10


def test_file_names_that_collide_or_are_not_text(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    folder = tmp_path / "in"
    folder.mkdir()
    for name in ("x.csv", "x.CSV"):
        (folder / name).write_text("text\na\n")
    run = {"out": tmp_path / "out", "producer": producer}
    with pytest.raises(DatasetError, match=r"two input files would have the output x\.csv"):
        simple().run(folder, **run)
    named = {"out": tmp_path / "out" / "part-{shard}.csv", "producer": producer}
    assert simple().run(folder, **named).succeeded == 2
    odd = tmp_path / "odd"
    odd.mkdir()
    Path(os.fsdecode(os.fsencode(odd) + b"/caf\xe9.jsonl")).write_text('{"text": "a"}\n')
    with pytest.raises(DatasetError, match="name is not UTF-8 text"):
        simple().run(odd, out=tmp_path / "out2", producer=producer)


def test_an_output_does_not_replace_its_input(producer: Producer, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    with pytest.raises(DatasetError, match="is the input, and would be replaced"):
        simple().run(source, out=source, producer=producer, overwrite=True)
    requests = tmp_path / "requests.jsonl"
    body = {"model": "m", "prompt": "p"}
    requests.write_text(
        json.dumps({"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}) + "\n"
    )
    with pytest.raises(DatasetError, match="is the request file, and would be replaced"):
        BatchFile(requests, requests).check()
    with pytest.raises(DatasetError, match=r"choose a name that ends with \.jsonl"):
        BatchFile(requests, tmp_path / "out.parquet").check()
    assert BatchFile(requests, tmp_path / "out.jsonl").check() == 1


def test_a_file_that_cannot_be_opened_is_named(
    producer: Producer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["a"])
    opening = Path.open

    def refuse(path: Path, *arguments: Any, **options: Any) -> Any:
        if path == source:
            raise PermissionError(13, "Permission denied")
        return opening(path, *arguments, **options)

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DatasetError, match=r"in\.jsonl cannot be read: Permission denied"):
        simple().run(source, out=tmp_path / "out.jsonl", producer=producer)


def test_a_continuation_that_is_given_twice_is_refused() -> None:
    with pytest.raises(DatasetError, match='"a" is given twice'):
        simple(task="score", continuations=["a", "b", "a"])


def test_cells_with_tabs_are_resumed_from_a_tsv(
    producer: Producer, ran: Counter[str], tmp_path: Path
) -> None:
    source = write_rows(tmp_path / "in.jsonl", ["head\n1\t2\n3\t4"])
    for _ in range(2):
        assert simple().run(source, out=tmp_path / "out.tsv", producer=producer).succeeded == 1
    assert sum(ran.values()) == 1


def test_frames_keep_values_of_any_order() -> None:
    columns: dict[str, list[Any]] = {
        "object": [{"a": 1}, {"a": 1, "b": 2}],
        "score": [1, 2.5],
        "large": [2**53 + 1, None],
    }
    frame = source_of(polars.DataFrame({"id": [1, 2]})).frame.labeled([0, 1], columns)  # type: ignore[attr-defined]
    assert frame["object"].to_list() == [{"a": 1, "b": None}, {"a": 1, "b": 2}]
    assert frame["score"].to_list() == [1.0, 2.5]
    frame = source_of(pandas.DataFrame({"id": [1, 2]})).frame.labeled([0, 1], columns)  # type: ignore[attr-defined]
    assert frame["large"].tolist() == [2**53 + 1, pandas.NA]
