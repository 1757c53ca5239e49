"""Writing a run's output: a temporary file beside it, renamed when it is complete."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, TextIO

from pagemill.producer.dataset.errors import DatasetError, DiskFailed
from pagemill.producer.dataset.tables.compressed import check_supported, compression, data_suffix, writing

PARQUET_ROWS = 4_096
OUTPUT = "output"
META = "_pagemill"
STEPS = "steps"
"""The field of `_pagemill` with what is known of each step of a recipe; JSON text in Parquet."""
TEXT_CELLS = (".csv", ".tsv", ".parquet")
"""File types whose cells hold values other than text as JSON text."""
_VECTOR = "vector"
"""The type of a column of lists of numbers."""


class Writer(Protocol):
    def write(self, line: Mapping[str, Any]) -> None:
        """Add one row: the input's columns, `output` and `_pagemill`."""
        ...


@contextmanager
def replacing(
    path: Path,
    samples: Iterable[Mapping[str, Any]] = (),
    output_column: str = OUTPUT,
    fields: Mapping[str, str] | None = None,
    *,
    gives_vectors: bool = False,
    more_meta: Collection[str] = (),
) -> Iterator[Writer]:
    """Open a writer whose file replaces `path` at the end of the block; an error leaves `path` as it was.

    `samples`: for Parquet, every input row, to find the columns' types. `fields`: further columns of the
    output, and their types. `gives_vectors`: outputs are lists of numbers, in Parquet a column of
    lists of float32. `more_meta`: what `_pagemill` has beside the usual, for Parquet. Raises DatasetError.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        if data_suffix(path) == ".parquet":
            columns = {output_column: _VECTOR if gives_vectors else ""}
            columns |= fields or {}
            parquet = ParquetWriter(temporary, _schema(samples, columns, more_meta), columns)
            try:
                yield parquet
            finally:
                parquet.close()
        else:
            with writing(temporary, compression(path)) as raw:
                text = io.TextIOWrapper(raw, "utf-8", newline="")
                yield _text_writer(text, data_suffix(path))
                text.flush()
                text.detach()
        temporary.replace(path)
        _sync_directory(path.parent)
    except OSError as error:
        raise DiskFailed(
            f"{path} could not be written ({error.strerror or error}). Mend that and run the same command again; "
            "nothing that was done is lost"
        ) from error
    finally:
        temporary.unlink(missing_ok=True)


def check_output(path: Path, name: str) -> None:
    """Raise DatasetError early for an output that could not be written at the end. `name`: what people call it."""
    if data_suffix(path) not in (".jsonl", ".ndjson", ".json", ".csv", ".tsv", ".parquet"):
        raise DatasetError(
            f"{name}: the output's name must end with .jsonl, .csv, .tsv (perhaps with .gz or .zst) or .parquet"
        )
    if data_suffix(path) == ".parquet" and compression(path):
        raise DatasetError(f"{name}: Parquet is compressed in itself; leave {path.suffix} out")
    check_supported(path)
    if not path.parent.is_dir():
        raise DatasetError(f"{path.parent} is no directory; make it first")
    if not os.access(path.parent, os.W_OK):
        raise DatasetError(f"{path.parent} is not writable")


class JsonLinesWriter:
    def __init__(self, file: TextIO) -> None:
        self._file = file

    def write(self, line: Mapping[str, Any]) -> None:
        self._file.write(json.dumps(line, ensure_ascii=False) + "\n")


class CsvWriter:
    """Writes CSV, with values other than text as JSON."""

    def __init__(self, file: TextIO, delimiter: str) -> None:
        self._csv = csv.writer(file, delimiter=delimiter)
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


class ParquetWriter:
    def __init__(self, path: Path, schema: Any, columns: Mapping[str, str]) -> None:
        from pyarrow import parquet

        self._schema = schema
        self._texts = [name for name, kind in columns.items() if not kind]
        self._path = path
        self._parquet = parquet.ParquetWriter(path, self._schema, compression="zstd")
        self._lines: list[dict[str, Any]] = []

    def write(self, line: Mapping[str, Any]) -> None:
        added = {name: _text(line[name]) for name in self._texts}
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


def _text_writer(file: TextIO, suffix: str) -> Writer:
    match suffix:
        case ".csv":
            return CsvWriter(file, ",")
        case ".tsv":
            return CsvWriter(file, "\t")
    return JsonLinesWriter(file)


def _schema(
    samples: Iterable[Mapping[str, Any]], added: Mapping[str, str], more_meta: Collection[str]
) -> Any:
    """Return every column's type, found by reading all rows: one guessed from the first may not hold.

    `added`: the output's columns and their types in a JSON schema; "" for values as JSON text.
    """
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
    for name, kind in added.items():
        schema = schema.append(pyarrow.field(name, types.get(kind, pyarrow.string())))
    return schema.append(pyarrow.field(META, pyarrow.struct(meta)))


def _cell(value: Any) -> str:
    return _text(value) or ""


def _text(value: Any) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _sync_directory(directory: Path) -> None:
    """Sync the directory: only then is a rename durable."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
