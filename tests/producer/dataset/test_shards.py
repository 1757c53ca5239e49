"""Runs over several files, and outputs of several files: every row once, in its file and in its order."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pagemill import Producer
from pagemill.producer.dataset import outputs as outputs_module
from pagemill.producer.dataset.bar import RunBar
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.outputs import base_of, output_of
from pagemill.producer.dataset.pipeline import Pipeline
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.tables.shards import changed_files, open_rows, open_shards
from pagemill.producer.dataset.tables.writers import Form
from pagemill.producer.dataset.work import Tally, TooManyErrors
from tests.producer.scripted_worker import scripted_worker

parquet = pytest.importorskip("pyarrow.parquet")
pyarrow = pytest.importorskip("pyarrow")
SIZES = (3, 0, 1, 5)


@pytest.fixture
def producer(valkey_url: str, queue_name: str) -> Iterator[Producer]:
    with Producer(valkey_url, queue=queue_name) as producer, scripted_worker(valkey_url, queue_name):
        yield producer


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


def simple(**options: Any) -> Pipeline:
    return Pipeline("{{ text }}", model="m", chat=False, **options)


def write_shard(path: Path, texts: list[str], *, group: int = 2) -> None:
    """Write a file of rows; Parquet in row groups of `group` rows."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        table = pyarrow.table({"text": pyarrow.array(texts, pyarrow.string()), "n": range(len(texts))})
        parquet.write_table(table, path, row_group_size=group)
    elif path.suffix == ".csv":
        path.write_text("text,n\n" + "".join(f"{text},{n}\n" for n, text in enumerate(texts)))
    else:
        path.write_text("".join(json.dumps({"text": text, "n": n}) + "\n" for n, text in enumerate(texts)))


def write_shards(folder: Path, suffix: str, sizes: tuple[int, ...] = SIZES) -> Path:
    for index, size in enumerate(sizes):
        write_shard(folder / f"part-{index}{suffix}", [f"{index}.{n}" for n in range(size)])
    return folder


def texts_of(path: Path) -> list[str]:
    """Return the outputs in a file, each of which equals its row's text."""
    rows = list(output_of(path, open_rows([path])).lines()) if path.stat().st_size else []
    found = [(row.fields or {}) for _, row in rows]
    assert all(fields["output"] == fields["text"] for fields in found)
    return [fields["output"] for fields in found]


def listed(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "_SUCCESS").read_text())
    return found


@pytest.mark.parametrize("suffix", [".jsonl", ".csv", ".parquet"])
def test_a_folder_in_and_a_folder_out(suffix: str, producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", suffix)
    summary = simple().run(source, out=out, producer=producer)
    assert (summary.rows, summary.succeeded) == (9, 9)
    names = [f"part-{index}{suffix}" for index in range(4)]
    assert sorted(os.listdir(out)) == ["_SUCCESS", *names]
    for index, size in enumerate(SIZES):
        assert texts_of(out / names[index]) == [f"{index}.{n}" for n in range(size)]
    manifest = listed(out)
    assert [(file["name"], file["rows"]) for file in manifest["files"]] == list(
        zip(names, SIZES, strict=True)
    )
    assert (manifest["rows"], manifest["succeeded"], manifest["failed"]) == (9, 9, 0)
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "out.run.json"}
    if suffix == ".parquet":  # readers of the folder find one schema, in empty files as well
        schemas = {str(parquet.read_schema(out / name).remove_metadata()) for name in names}
        assert len(schemas) == 1
        import pyarrow.dataset

        assert pyarrow.dataset.dataset(out).count_rows() == 9
    if suffix == ".csv":
        assert (out / names[1]).read_text().splitlines() == ["text,n,output,_pagemill"]


@pytest.mark.parametrize("given_as", ["pattern", "list", "folder with a slash"])
def test_patterns_and_lists_keep_paths_below_the_common_folder(
    given_as: str, producer: Producer, tmp_path: Path, out: Path
) -> None:
    write_shard(tmp_path / "in/lang=de/a.jsonl", ["x"])
    write_shard(tmp_path / "in/lang=en/a.jsonl", ["y", "z"])
    (tmp_path / "in/_SUCCESS").touch()
    source: Any = {
        "pattern": str(tmp_path / "in/*/*.jsonl"),
        "list": [tmp_path / "in/lang=de/a.jsonl", str(tmp_path / "in/lang=en/a.jsonl")],
        "folder with a slash": f"{tmp_path / 'in'}/",
    }[given_as]
    simple().run(source, out=out, producer=producer)
    assert texts_of(out / "lang=de/a.jsonl") == ["x"]
    assert texts_of(out / "lang=en/a.jsonl") == ["y", "z"]


def test_many_files_into_one(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".parquet")
    simple().run(source, out=out.with_suffix(".jsonl"), producer=producer)
    lines = [json.loads(line) for line in out.with_suffix(".jsonl").read_text().splitlines()]
    assert [line["output"] for line in lines] == [
        f"{i}.{n}" for i, size in enumerate(SIZES) for n in range(size)
    ]
    assert [line["_pagemill"]["row"] for line in lines] == list(range(1, 10))


@pytest.mark.parametrize("is_folder", [True, False])
def test_rows_per_file(is_folder: bool, producer: Producer, tmp_path: Path, out: Path) -> None:
    source: Path = write_shards(tmp_path / "in", ".jsonl")
    place: Any = out if is_folder else out / "rows-{shard}.parquet"
    simple().run(source, out=place, producer=producer, rows_per_file=4)
    name = "part-{:05}.jsonl" if is_folder else "rows-{:05}.parquet"
    assert [len(texts_of(out / name.format(index))) for index in range(3)] == [4, 4, 1]
    assert sum(file["rows"] for file in listed(out)["files"]) == 9


def test_one_file_into_many(producer: Producer, tmp_path: Path, out: Path) -> None:
    write_shard(tmp_path / "in.jsonl", [f"{n}" for n in range(5)])
    simple().run(tmp_path / "in.jsonl", out=out / "p-{shard}.jsonl", producer=producer, rows_per_file=2)
    assert [texts_of(out / f"p-0000{index}.jsonl") for index in range(3)] == [["0", "1"], ["2", "3"], ["4"]]


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 6), min_size=1, max_size=6),
    groups=st.integers(1, 4),
    rows_per_file=st.none() | st.integers(1, 7),
    suffix=st.sampled_from([".jsonl", ".parquet"]),
)
def test_any_layout_is_read_and_written_once(
    sizes: list[int], groups: int, rows_per_file: int | None, suffix: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    """Without a queue: the rows of the source, each with its own text as output."""
    place = tmp_path_factory.mktemp("layout")
    expected = [[f"{index}.{n}" for n in range(size)] for index, size in enumerate(sizes)]
    for index, texts in enumerate(expected):
        write_shard(place / f"in/{index}{suffix}", texts, group=groups)
    source = open_shards([place / "in"])
    rows = list(source.rows())
    assert source.count() == len(rows) == sum(sizes)
    assert [row.number for row in rows] == list(range(1, len(rows) + 1))
    assert [(row.shard, row.shard_row) for row in rows] == [
        (index, n + 1) for index, size in enumerate(sizes) for n in range(size)
    ]
    output, summary = output_of(place / "out", source, rows_per_file), Summary()
    output.check()
    with output.writing(lambda path: Form.from_path(path, [row.fields or {} for row in rows])) as writer:
        for row in rows:
            writer.reach(row)
            writer.write({**(row.fields or {}), "output": "x", "_pagemill": {"row": row.number}})
            summary.add_success({}, "x", None, is_merged=False)
        writer.end(summary, is_limited=False)
    flat = [text for texts in expected for text in texts]
    assert [(row.fields or {})["text"] for _, row in output.lines()] == flat
    counts = [file["rows"] for file in listed(place / "out")["files"]]
    if rows_per_file is None:
        assert counts == sizes
    else:
        assert all(count == rows_per_file for count in counts[:-1])
        assert sum(counts) == len(rows)
    output.check()


def test_errors_name_the_file_and_its_row(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    write_shard(source / "part-2.jsonl", ["good", "fail"])
    with (source / "part-3.jsonl").open("a") as file:
        file.write("{torn\n")
    summary = simple().run(source, out=out, producer=producer)
    assert (summary.rows, summary.succeeded, summary.failed) == (11, 9, 2)
    assert (summary.first_failure or "").startswith("row 5 (part-2.jsonl row 2): ")
    errors = [json.loads(line) for line in out.with_name("out.errors.jsonl").read_text().splitlines()]
    assert [(error["file"], error["file_row"]) for error in errors] == [
        ("part-2.jsonl", 2),
        ("part-3.jsonl", 6),
    ]
    manifest = listed(out)
    assert manifest["rows"] == 11 == manifest["succeeded"] + manifest["failed"]
    assert [entry["rows"] for entry in manifest["inputs"]] == [3, 0, 2, 6]
    assert [file["rows"] for file in manifest["files"]] == [3, 0, 1, 5]


def test_counts_that_do_not_add_up_are_never_published(tmp_path: Path, out: Path) -> None:
    source = open_shards([write_shards(tmp_path / "in", ".jsonl")])
    output = output_of(out, source)

    def write() -> None:
        with output.writing(lambda path: Form.from_path(path)) as writer:
            writer.reach(Row(1))
            writer.write({"text": "x"})
            writer.end(Summary(), is_limited=False)

    with pytest.raises(DatasetError, match="does not add up"):
        write()
    assert os.listdir(tmp_path) == ["in"]


def interrupt(source: Any, producer: Producer, out: Path) -> None:
    write_shard(Path(source) / "part-9.jsonl", ["fail"])
    with pytest.raises(TooManyErrors):
        simple().run(source, out=out, producer=producer, max_errors=0)
    assert not out.exists()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda folder: (folder / "part-0.jsonl").unlink(), "missing: part-0.jsonl"),
        (lambda folder: write_shard(folder / "part-7.jsonl", ["new"]), "added: part-7.jsonl"),
        (lambda folder: write_shard(folder / "part-3.jsonl", ["other"] * 5), "changed: part-3.jsonl"),
    ],
    ids=["missing", "added", "changed"],
)
def test_a_run_does_not_go_on_with_other_files(
    change: Any, says: str, producer: Producer, tmp_path: Path, out: Path
) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    interrupt(source, producer, out)
    change(source)
    with pytest.raises(DatasetError, match=says) as refused:
        simple().run(source, out=out, producer=producer)
    assert "--overwrite" in str(refused.value)
    assert not out.exists()
    summary = simple().run(source, out=out, producer=producer, overwrite=True)
    assert summary.succeeded == sum(len(texts_of(file)) for file in out.glob("part-*"))
    assert summary.adopted == 0
    assert summary.totals.starts >= 2, "what was done is kept"


def test_a_file_that_changes_during_the_run_is_noticed(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")

    def change(tally: Tally) -> None:
        write_shard(source / "part-0.jsonl", ["another"] * 3)

    with pytest.raises(DatasetError, match=r"changed: part-0\.jsonl"):
        simple().run(source, out=out, producer=producer, on_progress=change)
    assert not out.exists()


def test_a_finished_folder_is_taken_up(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".parquet")
    simple().run(source, out=out, producer=producer)
    write_shard(source / "part-4.parquet", ["new"])
    summary = simple().run(source, out=out, producer=producer)
    assert (summary.succeeded, summary.adopted) == (10, 9)
    assert texts_of(out / "part-4.parquet") == ["new"]


def test_a_crash_while_the_folder_is_replaced_leaves_one(
    producer: Producer, tmp_path: Path, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    simple().run(source, out=out, producer=producer)
    rename = Path.rename

    def fail(path: Path, target: Path) -> Path:
        if path.name == ".out.tmp":
            raise KeyboardInterrupt
        return rename(path, target)

    with monkeypatch.context() as patch:
        patch.setattr(outputs_module.Path, "rename", fail)
        with pytest.raises(KeyboardInterrupt):
            simple().run(source, out=out, producer=producer)
    assert not out.exists()
    assert simple().run(source, out=out, producer=producer).succeeded == 9
    assert {path.name for path in tmp_path.iterdir()} == {"in", "out", "out.run.json"}


KILLED = """
import os, signal, sys
from pathlib import Path
from pagemill import Producer
from pagemill.producer.dataset import outputs
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out, at = sys.argv[1:]
written = 0
class Dying(outputs._FolderWriter):
    def write(self, line):
        global written
        written += 1
        if written == int(at):
            os.kill(os.getpid(), signal.SIGKILL)
        super().write(line)
outputs._FolderWriter = Dying
with Producer(url, queue=queue) as producer:
    Pipeline("{{ text }}", model="m", chat=False).run(Path(source), out=out, producer=producer)
"""


@pytest.mark.slow
def test_killed_while_it_writes(
    producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path, out: Path
) -> None:
    source = write_shards(tmp_path / "in", ".parquet")
    command = [sys.executable, "-c", KILLED, valkey_url, queue_name, str(source), str(out), "6"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()
    assert simple().run(source, out=out, producer=producer).totals.starts == 2
    for index, size in enumerate(SIZES):
        assert texts_of(out / f"part-{index}.parquet") == [f"{index}.{n}" for n in range(size)]
    assert not {path.name for path in tmp_path.iterdir()} & {".out.tmp", ".out.old", "out.partial"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (pyarrow.decimal128(5, 2), pyarrow.decimal128(9, 4)),
        (pyarrow.time32("s"), pyarrow.time64("ns")),
        (pyarrow.duration("s"), pyarrow.duration("us")),
        (pyarrow.dictionary(pyarrow.int8(), pyarrow.string()), pyarrow.large_string()),
    ],
    ids=str,
)
def test_files_may_store_one_kind_of_values_differently(one: Any, other: Any, tmp_path: Path) -> None:
    for number, kind in enumerate((one, other)):
        empty = pyarrow.table({"text": ["a"], "n": pyarrow.array([None], kind)})
        parquet.write_table(empty, tmp_path / f"{number}.parquet")
    open_shards([tmp_path]).check_columns()


@pytest.mark.parametrize(
    ("columns", "other", "says"),
    [
        (
            {"text": ["a"], "n": [1]},
            {"text": ["a"], "n": ["1"]},
            "column 'n' holds text, and whole numbers in",
        ),
        ({"text": ["a"], "n": [1]}, {"text": ["a"]}, "has no column 'n', which"),
        ({"text": ["a"]}, {"text": ["a"], "m": [[1]]}, "has a column 'm', which"),
        (
            {"text": ["a"], "n": [[1]]},
            {"text": ["a"], "n": [["x"]]},
            "holds lists of text, and lists of whole",
        ),
    ],
)
def test_mixed_columns_are_refused_before_anything_is_submitted(
    columns: Any, other: Any, says: str, producer: Producer, tmp_path: Path, out: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    parquet.write_table(pyarrow.table(columns), source / "a.parquet")
    parquet.write_table(pyarrow.table(other), source / "b.parquet")
    with pytest.raises(DatasetError, match=says) as refused:
        simple().run(source, out=out, producer=producer)
    assert "b.parquet" in str(refused.value)
    assert "a.parquet" in str(refused.value)
    assert os.listdir(tmp_path) == ["in"]


def test_columns_that_are_equal_as_json_are_no_mix(tmp_path: Path) -> None:
    tables = [
        {"text": pyarrow.array(["a"]), "n": pyarrow.array([1], pyarrow.int32())},
        {"text": pyarrow.array([None]), "n": pyarrow.array([None])},
        {"n": pyarrow.array([1], pyarrow.int64()), "text": pyarrow.array(["a"]).dictionary_encode()},
        {"n": pyarrow.array([1], pyarrow.int8()), "text": pyarrow.array(["a"], pyarrow.large_string())},
    ]
    for index, table in enumerate(tables):
        parquet.write_table(pyarrow.table(table), tmp_path / f"{index}.parquet")
    open_shards([tmp_path]).check_columns()


def test_json_lines_may_leave_keys_out_but_not_change_their_type(
    producer: Producer, tmp_path: Path, out: Path
) -> None:
    source = tmp_path / "in"
    source.mkdir()
    (source / "a.jsonl").write_text('{"text": "a", "n": 1, "more": null}\n')
    (source / "b.jsonl").write_text('{"text": "b", "more": "x"}\n')
    open_shards([source]).check_columns()
    (source / "c.jsonl").write_text('{"text": {"deep": 1}}\n')
    with pytest.raises(DatasetError, match=r"c\.jsonl: column 'text' holds objects, and text in"):
        simple().run(source, out=out, producer=producer)
    (source / "c.jsonl").write_text('{"n": 2}\n')
    with pytest.raises(DatasetError, match=r"c\.jsonl: .*text"):
        simple().run(source, out=out, producer=producer)


def test_what_cannot_be_the_source(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    os.mkfifo(tmp_path / "pipe.jsonl")
    write_shards(tmp_path / "in", ".jsonl")
    write_shard(tmp_path / "in/a.csv", ["x"])
    for given_paths, says in [
        ([tmp_path / "empty"], "holds no files of rows"),
        ([tmp_path / "none-*.jsonl"], "no file matches"),
        ([tmp_path / "pipe.jsonl"], "not a regular file; give - as the name"),
        ([tmp_path / "in"], "have different formats"),
        ([tmp_path / "in/part-0.jsonl"] * 2, "named twice"),
        ([tmp_path / "in/part-0.jsonl", "-"], "cannot be read with other files"),
        ([tmp_path / "in/part-0.jsonl", "s3://bucket/b.jsonl"], "cannot be read with other files"),
        ([tmp_path / "in/part-0.jsonl", tmp_path / "nope.jsonl"], "no such file"),
    ]:
        with pytest.raises(DatasetError, match=says):
            open_rows(given_paths)


def test_what_cannot_be_the_output(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    write_shard(tmp_path / "one.jsonl", ["x"])
    (tmp_path / "precious").mkdir()
    (tmp_path / "precious/notes.txt").touch()
    for place, options, says in [
        (source, {}, "part-0.jsonl was not written by a run"),
        (source / "out", {}, "would be among the files"),
        (source / "out.jsonl", {}, "would be among the files"),
        (tmp_path / "precious", {}, "notes.txt was not written by a run"),
        (tmp_path / "one.jsonl", {"rows_per_file": 3}, "name a folder"),
        ("p-{shard}.jsonl", {}, "need a separate folder"),
        (tmp_path / "{shard}" / "p-{shard}.jsonl", {}, "only the last part"),
        (out / "p-{shard}.xyz", {}, "must end with .jsonl"),
        ("s3://bucket/out", {}, "local folder only"),
        (".", {}, "should name a file or folder"),
        (tmp_path / f"{'x' * 240}.jsonl", {}, "name too long; choose another --out"),
        (tmp_path / ("x" * 300) / "p.jsonl", {}, "name too long; choose another --out"),
        (out / "p.jsonl", {"output_column": "_pagemill"}, "choose another --output-column"),
    ]:
        with pytest.raises(DatasetError, match=says):
            simple().run(source, out=place, producer=producer, **options)
    with pytest.raises(DatasetError, match="the files need a name"):
        simple().run([{"text": "x"}], out=out, producer=producer)
    assert sorted(os.listdir(tmp_path)) == ["in", "one.jsonl", "precious"]


def test_a_list_of_files_that_is_no_runs_is_not_followed(tmp_path: Path, out: Path) -> None:
    source = open_shards([write_shards(tmp_path / "in", ".jsonl")])
    out.mkdir()
    for files in (["/etc/passwd"], ["../in/part-0.jsonl"], [1]):
        (out / "_SUCCESS").write_text(json.dumps({"files": [{"name": name} for name in files]}))
        with pytest.raises(DatasetError, match="not the list of a run"):
            output_of(out, source).check()


def test_a_trial_goes_on_as_the_whole(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    simple().run(source, out=out, producer=producer, limit=2)
    assert [file["name"] for file in listed(out)["files"]] == ["part-0.jsonl"]
    assert simple().run(source, out=out, producer=producer).adopted == 2
    assert len(listed(out)["files"]) == 4


def test_progress_names_the_file(producer: Producer, tmp_path: Path, out: Path) -> None:
    source = write_shards(tmp_path / "in", ".jsonl")
    seen = []
    simple().run(source, out=out, producer=producer, on_progress=lambda tally: seen.append(tally.files))
    assert seen[-1] == (4, 4)
    bar = RunBar(9)
    assert "file 4 of 4" in bar._figures(Tally(files=(4, 4)), 1.0)
    assert "file" not in bar._figures(Tally(), 1.0)


def test_changes_are_named_shortly() -> None:
    then = [[f"{n}.jsonl", 1, "a"] for n in range(6)]
    assert changed_files(then, then) == ""
    assert changed_files(then, then[:1]) == "missing: 1.jsonl, 2.jsonl, 3.jsonl and 2 more"
    assert changed_files(then, then[::-1]) == "another order of the files"


def test_the_files_beside_an_output_are_named_after_its_folder() -> None:
    assert base_of("labeled/part-{shard}.parquet") == "labeled"
    assert base_of("out.jsonl") == "out.jsonl"


MEASURED = """
import resource, sys
from pagemill import Producer
from pagemill.producer.dataset.pipeline import Pipeline
url, queue, source, out = sys.argv[1:]
with Producer(url, queue=queue) as producer:
    pipeline = Pipeline("{{ text }}", model="m", chat=False)
    summary = pipeline.run(source, out=out, producer=producer, window=2000)
print(summary.rows, summary.succeeded, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
"""


def run_measured(url: str, queue: str, tmp_path: Path, rows: int, shards: int) -> int:
    """Run over Parquet files with equal texts in many rows; returns the peak memory in MiB."""
    source, size = tmp_path / f"in-{rows}", rows // shards
    source.mkdir()
    for index in range(shards):
        texts = [f"row {n % 1000} {'x' * 200}" for n in range(size)]
        parquet.write_table(
            pyarrow.table({"text": texts}), source / f"part-{index:03}.parquet", row_group_size=50_000
        )
    out = tmp_path / f"out-{rows}"
    command = [sys.executable, "-c", MEASURED, url, queue, str(source), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    counted, succeeded, peak = map(int, done.stdout.split())
    assert counted == succeeded == rows
    written = [parquet.read_metadata(out / file["name"]).num_rows for file in listed(out)["files"]]
    assert written == [size] * shards
    return peak


@pytest.mark.slow
def test_memory_is_bounded(producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    small = run_measured(valkey_url, queue_name, tmp_path, 2_000, 4)
    large = run_measured(valkey_url, queue_name, tmp_path, 60_000, 4)
    assert large < small + 120, f"{small} and {large} MiB"


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_million_rows(producer: Producer, valkey_url: str, queue_name: str, tmp_path: Path) -> None:
    small = run_measured(valkey_url, queue_name, tmp_path, 2_000, 20)
    large = run_measured(valkey_url, queue_name, tmp_path, 2_000_000, 20)
    assert large < small + 150, f"{small} and {large} MiB"
