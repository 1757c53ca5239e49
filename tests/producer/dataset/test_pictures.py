"""Runs over pictures: columns of paths, bytes, URLs and structs, folders, bad rows, and bounded memory."""

from __future__ import annotations

import base64
import csv
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest

from pagemill import Producer
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.tables.rows import ARROW_BATCH_BYTES, open_source
from pagemill.producer.dataset.work import WINDOW_BYTES, WorkLoop
from pagemill.producer.wire.calls.transitions import PulledJob
from pagemill.producer.wire.schema.images import decode_data_url
from pagemill.producer.wire.schema.job import Job
from tests.producer.driving import Queue
from tests.producer.scripted_worker import scripted_worker


def picture(number: int, size: int = 0) -> bytes:
    """The shortest content that is recognized as a PNG: the producer does not decode pictures."""
    return b"\x89PNG\r\n\x1a\n" + b"%06d" % number + bytes(size)


def say_what_is_seen(queue: Queue, pulled: PulledJob) -> None:
    job = Job.from_payload(pulled.payload)
    assert job.messages is not None
    numbers = [str(int(decode_data_url(url)[8:14])) for url in job.images]
    queue.commit(pulled, f"{job.messages[-1].text} {'+'.join(numbers)}")


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    match path.suffix:
        case ".parquet":
            table = pyarrow.Table.from_pylist(rows)
            pyarrow.parquet.write_table(table, path, write_batch_size=16)  # rows per page, at least
        case ".csv":
            with path.open("w", newline="") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case _:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture
def run(valkey_url: str, queue_name: str, tmp_path: Path) -> Callable[..., tuple[Any, list[dict[str, Any]]]]:
    def run(source: Any, **options: Any) -> tuple[Any, list[dict[str, Any]]]:
        pipeline = Pipeline(options.pop("template", "What?"), model="m")
        out = tmp_path / "out.jsonl"
        options = {"image_column": "image", **options}
        with (
            Producer(valkey_url, queue=queue_name) as producer,
            scripted_worker(valkey_url, queue_name, run=say_what_is_seen),
        ):
            summary = pipeline.run(source, out=out, producer=producer, **options)
        return summary, [json.loads(line) for line in out.read_text().splitlines()]

    return run


@pytest.mark.slow
def test_kinds_of_columns(run: Any, tmp_path: Path) -> None:
    """Paths are relative to the file with the rows; outputs contain only a picture's name."""
    (tmp_path / "1.png").write_bytes(picture(1))
    text = base64.b64encode(picture(2)).decode()
    values: dict[str, list[Any]] = {
        "paths.csv": ["1.png", str(tmp_path / "1.png")],
        "bytes.parquet": [picture(2), picture(2)],
        "structs.parquet": [{"bytes": picture(2), "path": "x.png"}, {"bytes": None, "path": "1.png"}],
        "mixed.jsonl": [text, f"data:image/png;base64,{text}", ["1.png", text]],
    }
    shown = "[image/png, 14 bytes]"
    expected = {
        "paths.csv": [("1.png", "What? 1"), (str(tmp_path / "1.png"), "What? 1")],
        "bytes.parquet": [(shown, "What? 2")] * 2,
        "structs.parquet": [("x.png", "What? 2"), ("1.png", "What? 1")],
        "mixed.jsonl": [(shown, "What? 2")] * 2 + [(["1.png", shown], "What? 1+2")],
    }
    for name, column in values.items():
        source = write(tmp_path / name, [{"image": value} for value in column])
        summary, lines = run(source, overwrite=True)
        assert (summary.succeeded, summary.failed) == (len(column), 0)
        assert [(line["image"], line["output"]) for line in lines] == expected[name], name


def test_a_folder(run: Any, tmp_path: Path) -> None:
    names = ["a.png", "b/c.JPG", "b/d.webp"]
    for number, name in enumerate(names):
        (tmp_path / "photos" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "photos" / name).write_bytes(picture(number))
    (tmp_path / "photos" / "notes.txt").write_text("no picture")
    (tmp_path / "photos" / ".hidden.png").write_bytes(picture(9))
    _, lines = run(tmp_path / "photos", template="{{ image }}?")
    assert [(line["image"], line["output"]) for line in lines] == [
        ("a.png", "a.png? 0"),
        ("b/c.JPG", "b/c.JPG? 1"),
        ("b/d.webp", "b/d.webp? 2"),
    ]


def test_a_bad_picture_fails_its_row_and_is_tried_again(run: Any, tmp_path: Path) -> None:
    rows = [{"n": n, "image": f"{n}.png"} for n in range(4)]
    (tmp_path / "0.png").write_bytes(picture(0))
    (tmp_path / "1.png").write_text("text")
    (tmp_path / "2.png").mkdir()
    source = write(
        tmp_path / "rows.jsonl",
        [*rows, {"n": 4, "image": None}, {"n": 5, "image": base64.b64encode(b"x" * 9000).decode()}],
    )
    summary, lines = run(source)
    assert [line["output"] for line in lines] == ["What? 0"]
    assert (summary.succeeded, summary.failed) == (1, 5)
    assert summary.error_codes == {"invalid_image": 4, "null_in_prompt": 1}
    errors = (tmp_path / "out.jsonl.errors.jsonl").read_text()
    for reason in ("not a picture in PNG", "2.png is not a regular file", "cannot read 3.png: No such file"):
        assert reason in errors
    assert "eHh4" not in errors, "pixels"
    for number in (1, 3):
        (tmp_path / f"{number}.png").write_bytes(picture(number))
    summary, lines = run(source)
    assert [line["output"] for line in lines] == ["What? 0", "What? 1", "What? 3"]
    assert summary.failed == 3


def test_rows_from_python(run: Any) -> None:
    rows = ({"image": {"bytes": picture(n), "path": None}} for n in (3, 3, 4))
    summary, lines = run(rows)
    assert [line["output"] for line in lines] == ["What? 3", "What? 3", "What? 4"]
    assert summary.merged == 1, "equal pictures are one job"


def test_settings_that_make_no_job(run: Any, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="unknown column 'photo'; the columns are: image"):
        run([{"image": picture(1)}], image_column="photo")
    with pytest.raises(DatasetError, match="leave --no-chat out"):
        Pipeline("a", model="m", chat=False).run(
            [{"image": picture(1)}], out=tmp_path / "o.jsonl", image_column="image"
        )


def test_few_large_rows_are_held(tmp_path: Path, valkey_url: str, queue_name: str) -> None:
    """A row group of 60 MB is read in parts of 16 MiB, and large images reduce the window."""
    rows = [{"image": picture(n, 200_000)} for n in range(300)]
    source = open_source(write(tmp_path / "rows.parquet", rows))
    before = pyarrow.total_allocated_bytes()
    held = max(pyarrow.total_allocated_bytes() - before for _ in source.rows())
    assert 200_000 < held < 3 * ARROW_BATCH_BYTES
    with Producer(valkey_url, queue=queue_name) as producer:
        loop = WorkLoop(producer, None, window=20_000)  # type: ignore[arg-type]
        url = f"data:image/png;base64,{base64.b64encode(picture(1, 3_000_000)).decode()}"
        part = {"type": "image_url", "image_url": {"url": url}}
        job = Job.parse({"model": "m", "messages": [{"role": "user", "content": [part]}]})
        assert len(loop._chunk(iter([job] * 1_000))) == 9
        assert loop._window == WINDOW_BYTES // len(url)


RUN = """
import sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out = sys.argv[1:]
peak = 0
def measure(_):  # not ru_maxrss, which begins with the memory of the parent process
    global peak
    with open("/proc/self/statm") as file:
        peak = max(peak, int(file.read().split()[1]) * 4)
with Producer(url, queue=queue) as producer:
    summary = Pipeline("What?", model="m").run(
        source, out=out, producer=producer, image_column="image", window=500, on_progress=measure, on_row=measure
    )
print(summary.succeeded, peak)
"""


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_pictures_take_little_memory(valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    """300 MB of pictures in row groups of 2,500."""
    path = tmp_path / "rows.parquet"
    schema = pyarrow.schema([("image", pyarrow.binary())])
    with pyarrow.parquet.ParquetWriter(path, schema, write_batch_size=64) as writer:
        for start in range(0, 10_000, 2_500):
            rows = [{"image": picture(n, 30_000)} for n in range(start, start + 2_500)]
            writer.write_table(pyarrow.Table.from_pylist(rows, schema), row_group_size=2_500)
    with scripted_worker(valkey_url, queue_name, run=say_what_is_seen):
        done = subprocess.run(
            [sys.executable, "-c", RUN, valkey_url, queue_name, str(path), str(tmp_path / "out.jsonl")],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
    assert done.returncode == 0, done.stderr
    succeeded, peak = map(int, done.stdout.split())
    assert succeeded == 10_000
    assert 50_000 < peak < 450_000, f"{peak} KiB"
