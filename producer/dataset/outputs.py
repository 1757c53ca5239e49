"""The output of a run: one file, or a folder of files that appears complete.

A folder is written as `.NAME.tmp` next to its final location, and renamed at the end. So the location has an earlier
output, the complete new one, or, between two renames, none. `_SUCCESS` in it lists the files and their rows, like that
of Spark's committers; tools that read folders ignore it.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path, PurePath
from typing import Any

from pagemill.producer.dataset.errors import DatasetError, EmptyFile
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.compressed import compression, data_suffix
from pagemill.producer.dataset.tables.places import LocalPlace, Place, local_path, place_of, uri_of
from pagemill.producer.dataset.tables.rows import SUFFIXES, Row, Source, open_source
from pagemill.producer.dataset.tables.shards import ShardedSource
from pagemill.producer.dataset.tables.writers import (
    Form,
    NoWriter,
    Writer,
    check_output,
    disk_errors,
    replacing,
    sync_directory,
)

PLACE = "{shard}"
"""Placeholder for the number of the file in an output's name."""
COMPLETE = "_SUCCESS"
INCOMPLETE = "_INCOMPLETE"
"""The list of files of an output with missing rows."""

_LONGEST_SUFFIX = "..errors.jsonl.4194304.tmp"
"""The longest suffix that a run adds to the name of its output."""


class FileOutput:
    """An output of one file."""

    def __init__(self, place: Place) -> None:
        self.place = place
        self.path = place.path

    def check(self) -> None:
        """Raise DatasetError early for an output that could not be written at the end."""
        check_output(self.path, self.place.name)

    def lines(self) -> Iterator[tuple[Path, Row]]:
        """Yield the lines of an earlier run, each with its file."""
        try:
            yield from ((self.path, row) for row in open_source(self.path, quoting="own").rows())
        except EmptyFile:
            return

    @contextmanager
    def writing(self, form: Callable[[Path], Form]) -> Iterator[_FileWriter]:
        """Replace the output at the end of the block. `form` is called with a file's name."""
        with replacing(self.path, form) as writer:
            yield _FileWriter(writer)


class _FileWriter:
    def __init__(self, writer: Writer) -> None:
        self.write = writer.write

    def reach(self, row: Row) -> None:
        """Note that this row is next, whether or not it has a line."""

    def end(self, summary: Summary, *, is_limited: bool) -> None:
        """Note that all lines are written."""


class FolderOutput:
    """An output of several files: one per file of the source or, with `rows_per_file`, one per that many rows."""

    def __init__(self, folder: Path, name: str, source: Source, rows_per_file: int | None) -> None:
        """`name`: the name of each file with `{shard}`; empty: the names of the source's files."""
        self.place: Place = LocalPlace(folder.resolve() if folder.is_symlink() else folder)
        self.path = self.place.path
        self.source = source
        self.rows_per_file = rows_per_file
        inputs = source.shards if isinstance(source, ShardedSource) else ()
        self.inputs = [shard.name for shard in inputs] or [source.name]
        self._name = name
        if not name and not (inputs and all(data_suffix(shard.path) in SUFFIXES for shard in inputs)):
            raise DatasetError(f"the files need a name: --out {folder}/part-{PLACE}.jsonl (or .parquet, ...)")
        if not name and rows_per_file:
            self._name = f"part-{PLACE}{''.join(_suffixes(self.inputs[0]))}"

    def file_name(self, number: int) -> str:
        """Return the name of a file of the output, counted from 0."""
        if self._name:
            return self._name.replace(PLACE, f"{number:05}")
        stem, suffix, packed = _stem(self.inputs[number]), *_suffixes(self.inputs[number])
        return f"{stem}{suffix}{packed}"

    def check(self) -> None:
        """Raise DatasetError early for an output that could not be written at the end."""
        check_output(
            self.path.with_name(PurePath(self.file_name(0)).name), str(self.path / self.file_name(0))
        )
        if not self._name:
            names = Counter(self.file_name(number) for number in range(len(self.inputs)))
            if twice := [name for name, count in names.items() if count > 1]:
                raise DatasetError(
                    f"two input files would have the output {twice[0]}; name the files: {self.path}/part-{PLACE}..."
                )
        if os.path.ismount(self.path):
            raise DatasetError(
                f"{self.path} is a mount point and cannot be replaced atomically; name a folder in it"
            )
        if not self.path.is_dir() and self.path.exists():
            raise DatasetError(f"{self.path} is a file; name a folder, or a file with its suffix")
        self._recover()
        if self.path.is_dir():
            known = {COMPLETE, INCOMPLETE, *self._listed()}
            for file in sorted(self.path.rglob("*")):
                if not file.is_dir() and file.relative_to(self.path).as_posix() not in known:
                    raise DatasetError(f"{file} was not written by a run; choose another --out")

    def lines(self) -> Iterator[tuple[Path, Row]]:
        """Yield the lines of an earlier run, each with its file."""
        for name in self._listed():
            try:
                rows = open_source(self.path / name, quoting="own").rows()
                yield from ((self.path / name, row) for row in rows)
            except EmptyFile:
                continue

    @contextmanager
    def writing(self, form: Callable[[Path], Form]) -> Iterator[_FolderWriter]:
        """Replace the output at the end of the block. `form` is called with a file's name."""
        temporary = self._beside("tmp")
        with disk_errors(self.path):
            shutil.rmtree(temporary, ignore_errors=True)  # left by a killed run
            temporary.mkdir()
            try:
                with ExitStack() as stack:
                    yield _FolderWriter(self, form(self.path / self.file_name(0)), temporary, stack)
                for directory in {file.parent for file in temporary.rglob("*")}:
                    sync_directory(directory)
                if self.path.exists():
                    self.path.rename(self._beside("old"))
                temporary.rename(self.path)
                sync_directory(self.path.parent)
                shutil.rmtree(self._beside("old"), ignore_errors=True)
            finally:
                shutil.rmtree(temporary, ignore_errors=True)

    def _recover(self) -> None:
        """Complete the renames of a run that was killed between them."""
        old = self._beside("old")
        if old.is_dir() and self.path.exists():
            shutil.rmtree(old, ignore_errors=True)
        elif old.is_dir():
            old.rename(self.path)

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(f".{self.path.name}.{kind}")

    def _listed(self) -> list[str]:
        """Return the files in the list of the run that wrote the folder."""
        for name in (COMPLETE, INCOMPLETE):
            try:
                listed = [file["name"] for file in json.loads((self.path / name).read_text("utf-8"))["files"]]
            except FileNotFoundError:
                continue
            except (ValueError, KeyError, TypeError):
                listed = [""]
            if not all(isinstance(one, str) and _is_inside(one) for one in listed):
                raise DatasetError(f"{self.path / name} is not the list of a run; choose another --out")
            return listed
        return []


class _FolderWriter:
    """Writes the files of a folder sequentially."""

    def __init__(self, output: FolderOutput, form: Form, folder: Path, stack: ExitStack) -> None:
        self._output = output
        self._form = form
        self._folder = folder
        self._outer = stack
        self._open = stack.enter_context(ExitStack())
        self._writer: Writer | None = None
        self._files: list[dict[str, Any]] = []
        self._read: Counter[int] = Counter()

    def reach(self, row: Row) -> None:
        """Note that this row is next, whether or not it has a line."""
        self._read[row.shard] += 1
        while not self._output.rows_per_file and len(self._files) <= row.shard:
            self._next()

    def write(self, line: Any) -> None:
        """Add one row."""
        if self._writer is None or self._files[-1]["rows"] == self._output.rows_per_file:
            self._next()
        assert self._writer is not None
        self._writer.write(line)
        self._files[-1]["rows"] += 1

    def end(self, summary: Summary, *, is_limited: bool) -> None:
        """Write the list of files. Raises DatasetError if the numbers of rows read and written do not match.

        `is_limited`: further rows were not read, nor were the source's later files.
        """
        while (
            not self._output.rows_per_file and not is_limited and len(self._files) < len(self._output.inputs)
        ):
            self._next()
        if not self._files:
            self._next()
        self._open.close()
        read, written = self._read.total(), sum(file["rows"] for file in self._files)
        ended = summary.succeeded + summary.failed + summary.skipped + summary.unfinished
        if not read == summary.rows == ended or written != summary.succeeded:
            raise DatasetError(
                f"{read:,} rows were read, {written:,} written, {summary.failed:,} failed and {summary.skipped:,} "
                "skipped, which does not add up; run the same command again"
            )
        inputs = [{"name": name, "rows": self._read[index]} for index, name in enumerate(self._output.inputs)]
        counts = {"rows": summary.rows, "succeeded": summary.succeeded, "failed": summary.failed}
        counts |= {"skipped": summary.skipped, "unfinished": summary.unfinished}
        listed = {"files": self._files, "inputs": inputs, **counts}
        marker = self._folder / (INCOMPLETE if summary.unfinished else COMPLETE)
        with marker.open("w", encoding="utf-8") as file:
            json.dump(listed, file, ensure_ascii=False, indent=2)
            file.flush()
            os.fsync(file.fileno())

    def _next(self) -> None:
        """Start the next file."""
        self._open.close()
        name = self._output.file_name(len(self._files))
        path = self._folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        self._writer = self._open.enter_context(self._form.open(path))
        self._files.append({"name": PurePath(name).as_posix(), "rows": 0})


Output = FileOutput | FolderOutput
LineWriter = _FileWriter | _FolderWriter


def no_lines() -> LineWriter:
    """Return a writer that drops all lines."""
    return _FileWriter(NoWriter())


def base_of(out: str | Path) -> str | Path:
    """Return the path after which the files next to an output are named: the folder's for `DIR/part-{shard}.jsonl`."""
    return os.path.dirname(str(out)) or out if PLACE in os.path.basename(str(out)) else out


def output_of(out: str | Path, source: Source, rows_per_file: int | None = None) -> Output:
    """Return the output of a run. Raises DatasetError."""
    name = os.path.basename(str(out))
    is_folder = PLACE in name or not PurePath(name).suffix
    if uri_of(out) is not None:
        if is_folder or rows_per_file:
            raise DatasetError(
                f"{place_of(base_of(out)).name}: several files can be written to a local folder only"
            )
        return FileOutput(place_of(out))
    _check_reachable(local_path(out))
    if not local_path(out).name:
        raise DatasetError(f"the output {str(out)!r} should name a file or folder")
    if PLACE in name:
        folder = os.path.dirname(str(out))
        if PLACE in folder:
            raise DatasetError(f"{out}: only the last part of the name can have {PLACE}")
        if folder in ("", ".", ".."):
            raise DatasetError(f"{out}: the files need a separate folder, such as out/{name}")
        return FolderOutput(local_path(folder), name, source, rows_per_file)
    if is_folder or local_path(out).is_dir():
        return FolderOutput(local_path(out), "", source, rows_per_file)
    if rows_per_file:
        raise DatasetError(
            f"rows_per_file gives several files: name a folder, or out/part-{PLACE}.jsonl, not {out}"
        )
    return FileOutput(place_of(out))


def _check_reachable(path: Path) -> None:
    """Raise DatasetError for a path that the system rejects, as it is or as the name of a file of the run."""
    try:
        os.lstat(f"{path}{_LONGEST_SUFFIX}")
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise DatasetError(f"{path}: {error.strerror}; choose another --out") from None


def _suffixes(name: str) -> tuple[str, str]:
    """Return the suffix of an output in the format of this input, and that of its compression."""
    path = PurePath(name)
    suffix = data_suffix(path)
    return ".parquet" if suffix == ".arrow" else suffix, compression(path) or ""


def _stem(name: str) -> str:
    return re.sub(
        r"\.[^./]*$", "", name.removesuffix(PurePath(name).suffix if compression(PurePath(name)) else "")
    )


def _is_inside(name: str) -> bool:
    return bool(name) and not os.path.isabs(name) and ".." not in PurePath(name).parts
