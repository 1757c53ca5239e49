"""Writing a run's output: a temporary file beside it, renamed when it is complete."""

from __future__ import annotations

import csv
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from pagemill.producer.dataset.rows import DatasetError, DiskFailed

PARQUET_ROWS = 4_096
OUTPUT = "output"
META = "_pagemill"
TEXT_CELLS = (".csv", ".tsv", ".parquet")
"""File types whose cells hold values other than text as JSON text."""


class Writer(Protocol):
    def write(self, line: Mapping[str, Any]) -> None:
        """Add one row: the input's columns, `output` and `_pagemill`."""
        ...

    def close(self) -> None:
        """Flush everything to disk."""
        ...


@contextmanager
def replacing(
    path: Path,
    samples: Iterable[Mapping[str, Any]] = (),
    output_column: str = OUTPUT,
    *,
    gives_vectors: bool = False,
) -> Iterator[Writer]:
    """Open a writer whose file replaces `path` at the end of the block; an error leaves `path` as it was.

    `samples`: for Parquet, every input row, to find the columns' types. `gives_vectors`: outputs are lists of
    numbers, in Parquet a column of lists of float32. Raises DatasetError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        writer: Writer
        if path.suffix.lower() == ".parquet":
            writer = ParquetWriter(temporary, samples, output_column, gives_vectors=gives_vectors)
        else:
            writer = _writer(temporary, path.suffix.lower())
        try:
            yield writer
        finally:
            writer.close()
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise DiskFailed(
            f"{path} could not be written ({error.strerror or error}). Mend that and run the same command again; "
            "nothing that was done is lost"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path) -> None:
    """Raise DatasetError early for an output that could not be written at the end."""
    if path.suffix.lower() not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"):
        raise DatasetError(f"{path}: the output's name must end with .jsonl, .csv, .tsv or .parquet")
    if not path.parent.is_dir():
        raise DatasetError(f"{path.parent} is no directory; make it first")
    if not os.access(path.parent, os.W_OK):
        raise DatasetError(f"{path.parent} is not writable")


class JsonLinesWriter:
    def __init__(self, path: Path) -> None:
        self._file = path.open("w", encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class CsvWriter:
    """Writes CSV, with values other than text as JSON."""

    def __init__(self, path: Path, delimiter: str) -> None:
        self._file = path.open("w", encoding="utf-8", newline="")
        self._csv = csv.writer(self._file, delimiter=delimiter)
        self._columns: list[str] | None = None

    def write(self, line: Mapping[str, Any]) -> None:
        if self._columns is None:
            self._columns = list(line)
            self._csv.writerow(self._columns)
        if surplus := line.keys() - set(self._columns):
            raise DatasetError(
                f"rows have different columns ({', '.join(sorted(surplus))}): write .jsonl, not CSV"
            )
        self._csv.writerow([_cell(line.get(name)) for name in self._columns])

    def close(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()


class ParquetWriter:
    def __init__(
        self, path: Path, samples: Iterable[Mapping[str, Any]], output_column: str, *, gives_vectors: bool
    ) -> None:
        from pyarrow import parquet

        self._gives_vectors = gives_vectors
        self._schema = _schema(samples, output_column, gives_vectors=gives_vectors)
        self._output_column = output_column
        self._path = path
        self._parquet = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._lines: list[dict[str, Any]] = []

    def write(self, line: Mapping[str, Any]) -> None:
        output = line[self._output_column]
        self._lines.append({**line, self._output_column: output if self._gives_vectors else _cell(output)})
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


def _writer(path: Path, suffix: str) -> Writer:
    match suffix:
        case ".csv":
            return CsvWriter(path, ",")
        case ".tsv":
            return CsvWriter(path, "\t")
    return JsonLinesWriter(path)


def _schema(samples: Iterable[Mapping[str, Any]], output_column: str, *, gives_vectors: bool = False) -> Any:
    """Return every column's type, found by reading all rows: one guessed from the first may not hold."""
    import pyarrow

    schema = pyarrow.schema([])
    chunk: list[Mapping[str, Any]] = []

    def grown(schema: Any, rows: list[Mapping[str, Any]]) -> Any:
        columns = dict.fromkeys(name for row in rows for name in row)
        try:
            fields = [
                pyarrow.field(name, pyarrow.infer_type([row.get(name) for row in rows])) for name in columns
            ]
            return pyarrow.unify_schemas([schema, pyarrow.schema(fields)], promote_options="permissive")
        except (pyarrow.ArrowInvalid, pyarrow.ArrowTypeError) as error:
            raise DatasetError(f"a column holds values of different types ({error}): write .jsonl") from error

    for row in samples:
        chunk.append(row)
        if len(chunk) == PARQUET_ROWS:
            schema, chunk = grown(schema, chunk), []
    schema = grown(schema, chunk)
    if META in schema.names:
        schema = schema.remove(schema.get_field_index(META))
    usage = [(name, pyarrow.int64()) for name in ("prompt_tokens", "completion_tokens", "cached_tokens")]
    meta = [
        ("key", pyarrow.string()),
        ("row", pyarrow.int64()),
        ("finish_reason", pyarrow.string()),
        ("usage", pyarrow.struct(usage)),
    ]
    output = pyarrow.list_(pyarrow.float32()) if gives_vectors else pyarrow.string()
    return schema.append(pyarrow.field(output_column, output)).append(
        pyarrow.field(META, pyarrow.struct(meta))
    )


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sync_directory(directory: Path) -> None:
    """Sync the directory: only then is a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
