"""Compressed files as input and output: .gz and .zst are handled like their content."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pyarrow
import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables import compressed, rows
from pagemill.producer.dataset.tables.rows import open_source
from tests.producer.scripted_worker import scripted_worker

TEXTS = ["a", 'ü,"x"', "line\nbreak"]
JSONL = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)
CSV = 'text\na\n"ü,""x"""\n"line\nbreak"\n'


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name):
        yield producer


def write(path: Path, text: str) -> Path:
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(text.encode()))
    else:
        with pyarrow.output_stream(str(path), compression="zstd") as file:
            file.write(text.encode())
    return path


def texts(path: Path) -> list[str]:
    return [row.fields["text"] for row in open_source(path).rows() if row.fields]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
@pytest.mark.parametrize(("name", "text"), [("in.jsonl", JSONL), ("in.csv", CSV), ("IN.NDJSON", JSONL)])
def test_a_compressed_file_has_the_rows_that_it_holds(
    suffix: str, name: str, text: str, tmp_path: Path
) -> None:
    path = write(tmp_path / f"{name}{suffix}", text)
    assert texts(path) == TEXTS
    assert open_source(path).count() == 3


@pytest.mark.parametrize("name", ["out.jsonl.gz", "out.csv.gz", "out.tsv.zst", "out.jsonl.zst"])
def test_an_output_is_compressed_and_can_be_taken_up_again(
    name: str, producer: Producer, tmp_path: Path
) -> None:
    source = write(tmp_path / "in.jsonl.gz", JSONL)
    out = tmp_path / name
    pipeline = Pipeline("{{ text }}", model="m", chat=False)
    assert pipeline.run(source, out=out, producer=producer).succeeded == 3
    assert texts(out) == TEXTS
    first = out.read_bytes()
    assert first.startswith(b"\x1f\x8b" if name.endswith("gz") else b"\x28\xb5\x2f\xfd")
    assert pipeline.run(source, out=out, producer=producer).adopted == 3
    assert out.read_bytes() == first


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_torn_or_wrong_file_is_refused(suffix: str, tmp_path: Path) -> None:
    path = write(tmp_path / f"in.jsonl{suffix}", JSONL * 100)
    for broken in (path.read_bytes()[:-9], b"no archive", path.read_bytes()[:20] + bytes(20)):
        path.write_bytes(broken)
        with pytest.raises(DatasetError, match="cannot be read"):
            texts(path)


def test_a_long_line_is_not_unpacked_into_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows, "MAX_LINE_BYTES", 1_000)
    path = write(tmp_path / "in.jsonl.gz", '{"text": "' + "x" * 100_000 + '"}\n' + JSONL)
    first, *others = open_source(path).rows()
    assert first.error is not None
    assert first.error.code == "payload_too_large"
    assert len(others) == 3


def test_what_is_compressed_in_itself_is_not_compressed_again(tmp_path: Path) -> None:
    path = write(tmp_path / "in.parquet.gz", "x")
    with pytest.raises(DatasetError, match="parquet files are compressed in themselves"):
        open_source(path)
    with pytest.raises(DatasetError, match=r"leave \.gz out"):
        Pipeline("{{ text }}", model="m").run([{"text": "a"}], out=tmp_path / "out.parquet.gz")


def test_zst_without_pyarrow_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write(tmp_path / "in.jsonl.zst", JSONL)
    monkeypatch.setattr(compressed.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DatasetError, match=r"pip install 'pagemill\[parquet\]'"):
        open_source(path)
