"""Writing a run's output: a temporary file next to it, renamed when it is complete."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TextIO

from pagemill.producer.dataset.errors import DatasetError, DiskError
from pagemill.producer.dataset.tables.column_types import column_types, fitted
from pagemill.producer.dataset.tables.compressed import check_supported, compression, data_suffix, writing

PARQUET_ROWS = 4_096
OUTPUT = "output"
META = "_pagemill"
STEPS = "steps"
"""The field of `_pagemill` with the data of each step of a recipe; JSON text in Parquet."""
TEXT_CELLS = (".csv", ".tsv", ".parquet")
"""File types whose cells contain values other than text as JSON text."""
_VECTOR = "vector"
"""The type of a column of lists of numbers."""


class Writer(Protocol):
    def write(self, line: Mapping[str, Any]) -> None:
        """Add one row: the input's columns, `output` and `_pagemill`."""
        ...


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which the lines of an output are written, to one file or to several."""

    suffix: str
    compression: str | None
    columns: Mapping[str, str]
    """The output's columns and their types; "" for values as JSON text."""
    schema: Any = None
    """For Parquet, the type of every column."""
    texts: Sequence[str] = ()
    """For Parquet, the input's columns with values of several types, as JSON text."""
    heading: Sequence[str] = ()
    """For CSV, the columns of all rows."""

    @classmethod
    def from_path(
        cls,
        path: Path,
        samples: Iterable[Mapping[str, Any]] = (),
        output_column: str = OUTPUT,
        fields: Mapping[str, str] | None = None,
        *,
        gives_vectors: bool = False,
        more_meta: Collection[str] = (),
    ) -> Form:
        """Return the form of files named like `path`.

        Args:
            path: Its suffix determines the format.
            samples: Every input row: for Parquet, to determine the columns' types, for CSV, their names. Rows may
                differ in their columns, and the values of a column in their types.
            output_column: The name of the output's column.
            fields: Further columns of the output, and their types.
            gives_vectors: Outputs are lists of numbers, in Parquet a column of lists of float32.
            more_meta: Additional fields of `_pagemill`, for Parquet.
        """
        columns = {output_column: _VECTOR if gives_vectors else "", **(fields or {})}
        suffix = data_suffix(path)
        if suffix == ".parquet":
            schema, texts = _schema(samples, columns, more_meta)
            return cls(suffix, None, columns, schema, texts)
        heading = _heading(samples, columns) if suffix in (".csv", ".tsv") else []
        return cls(suffix, compression(path), columns, heading=heading)

    @contextmanager
    def open(self, path: Path) -> Iterator[Writer]:
        """Write a new file; at the end of the block it is on disk."""
        if self.suffix == ".parquet":
            parquet = ParquetWriter(path, self.schema, self.columns, self.texts)
            try:
                yield parquet
            finally:
                parquet.close()
            return
        with writing(path, self.compression) as raw:
            text = io.TextIOWrapper(raw, "utf-8", newline="")
            yield _text_writer(text, self.suffix, self.heading)
            text.flush()
            text.detach()


@contextmanager
def replacing(path: Path, form: Callable[[Path], Form] | None = None) -> Iterator[Writer]:
    """Open a writer whose file replaces `path` at the end of the block; an error leaves `path` as it was.

    `form` is called with the path, by default `Form.from_path`. Raises DatasetError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with disk_errors(path):
            with (form or Form.from_path)(path).open(temporary) as writer:
                yield writer
            temporary.replace(path)
            sync_directory(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def disk_errors(path: Path) -> Iterator[None]:
    """Raise DiskError for an OSError of the block, which writes `path`."""
    try:
        yield
    except OSError as error:
        raise DiskError(
            f"{path} could not be written ({error.strerror or error}). Fix that and run the same command again; "
            "nothing that was done is lost"
        ) from error


def check_output(path: Path, name: str) -> None:
    """Raise DatasetError early for an output that could not be written at the end. `name`: its name in messages."""
    if data_suffix(path) not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"):
        raise DatasetError(
            f"{name}: the output's name must end with .jsonl, .csv, .tsv (perhaps with .gz or .zst) or .parquet"
        )
    if data_suffix(path) == ".parquet" and compression(path):
        raise DatasetError(f"{name}: Parquet is compressed in itself; leave {path.suffix} out")
    check_supported(path)
    if not path.parent.is_dir():
        raise DatasetError(f"{path.parent} is not a directory; create it first")
    if not os.access(path.parent, os.W_OK):
        raise DatasetError(f"{path.parent} is not writable")


class NoWriter:
    """The output of a trial, which only needs statistics."""

    def write(self, line: Mapping[str, Any]) -> None:
        """Drop the row."""


class JsonLinesWriter:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")


class CsvWriter:
    """Writes CSV, with values other than text as JSON. `columns`: by default those of the first row."""

    def __init__(self, file: TextIO, delimiter: str, columns: Sequence[str] = ()) -> None:
        self._csv = csv.writer(file, delimiter=delimiter)
        self._columns = columns
        if columns:
            self._csv.writerow(columns)

    def write(self, line: Mapping[str, Any]) -> None:
        if not self._columns:
            self._columns = list(line)
            self._csv.writerow(self._columns)
        self._csv.writerow([_cell(line.get(name)) for name in self._columns])


class ParquetWriter:
    """Writes Parquet. `columns`: those of the output, `texts`: further ones with values as JSON text."""

    def __init__(self, path: Path, schema: Any, columns: Mapping[str, str], texts: Sequence[str]) -> None:
        from pyarrow import parquet

        self._schema = schema
        self._texts = [*texts, *(name for name, kind in columns.items() if not kind)]
        self._typed = {name: kind for name, kind in columns.items() if kind and kind != _VECTOR}
        self._path = path
        self._parquet = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._lines: list[dict[str, Any]] = []

    def write(self, line: Mapping[str, Any]) -> None:
        added = {name: _text(line.get(name)) for name in self._texts}
        # A model without a constraint to its schema may return other values; the output's column has them.
        added |= {name: fitted(line[name], kind) for name, kind in self._typed.items()}
        if STEPS in line[META]:
            added[META] = line[META] | {STEPS: _text(line[META][STEPS])}
        self._lines.append({**line, **added})
        if len(self._lines) == PARQUET_ROWS:
            self._flush()

    def close(self) -> None:
        self._flush()
        self._parquet.close()
        with self._path.open("rb+") as file:
            os.fsync(file.fileno())

    def _flush(self) -> None:
        import pyarrow

        if self._lines:
            self._parquet.write_table(pyarrow.Table.from_pylist(self._lines, schema=self._schema))
            self._lines = []


def _text_writer(file: TextIO, suffix: str, heading: Sequence[str]) -> Writer:
    match suffix:
        case ".csv":
            return CsvWriter(file, ",", heading)
        case ".tsv":
            return CsvWriter(file, "\t", heading)
    return JsonLinesWriter(file)


def _heading(samples: Iterable[Mapping[str, Any]], added: Iterable[str]) -> list[str]:
    """Return the columns of all rows, and those of the output; none if there are no rows."""
    names = dict.fromkeys(name for row in samples for name in row)
    for name in (META, *added):
        names.pop(name, None)
    return [*names, *added, META] if names else []


def _schema(
    samples: Iterable[Mapping[str, Any]], added: Mapping[str, str], more_meta: Collection[str]
) -> tuple[Any, list[str]]:
    """Return every column's type, and the input's columns whose values are written as JSON text.

    `added`: the output's columns and their types in a JSON schema; "" for values as JSON text.
    """
    import pyarrow

    known = column_types(samples, {META, *added}, PARQUET_ROWS)
    usage = [(name, pyarrow.int64()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    meta = [
        ("key", pyarrow.string()),
        ("row", pyarrow.int64()),
        ("finish_reason", pyarrow.string()),
        ("usage", pyarrow.struct(usage)),
    ]
    if STEPS in more_meta:
        meta.append((STEPS, pyarrow.string()))
    if "logprobs" in more_meta:
        token = pyarrow.struct(
            [("token_id", pyarrow.int64()), ("logprob", pyarrow.float64()), ("text", pyarrow.string())]
        )
        position = pyarrow.struct([("chosen", token), ("top", pyarrow.list_(token))])
        meta.append(("logprobs", pyarrow.list_(pyarrow.list_(position))))
    if "probability" in added.values():
        meta.append(("label_temperature", pyarrow.float64()))
    types = {
        "integer": pyarrow.int64(),
        "number": pyarrow.float64(),
        "probability": pyarrow.float64(),
        "boolean": pyarrow.bool_(),
        _VECTOR: pyarrow.list_(pyarrow.float32()),
    }
    return pyarrow.schema(
        [
            *((name, pyarrow.string() if kind is None else kind) for name, kind in known.items()),
            *((name, types.get(kind, pyarrow.string())) for name, kind in added.items()),
            (META, pyarrow.struct(meta)),
        ]
    ), [name for name, kind in known.items() if kind is None]


def _cell(value: Any) -> str:
    return _text(value) or ""


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def sync_directory(directory: Path) -> None:
    """Sync the directory, without which a rename is not durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
