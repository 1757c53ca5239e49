"""Rows of a dataset, read one at a time: JSONL, CSV, Parquet, a Hugging Face dataset directory, any iterable.

A row that cannot be read is a row with an error: it keeps its number and the run continues.
"""

from __future__ import annotations

import csv
import importlib.util
import io
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, TypeAlias

from pagemill.producer.dataset.errors import DatasetError, EmptyFile
from pagemill.producer.dataset.tables.arrow_cells import BadCells, arrow_rows
from pagemill.producer.dataset.tables.compressed import check_supported, compression, data_suffix, reading
from pagemill.producer.dataset.tables.streams import Stream
from pagemill.producer.dataset.tables.values import is_unicode, number_of, plain_row

MAX_LINE_BYTES = 64 << 20
"""Longest line; a longer one is skipped as one bad row, without being held in memory."""
MAX_RAW_CHARACTERS = 2_000
"""Characters of a bad row that the errors file quotes."""
ARROW_BATCH_ROWS = 1_024
ARROW_BATCH_BYTES = 16 << 20
"""Rows with pictures are read in smaller batches."""

Format: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet", "arrow"]
SUFFIXES: dict[str, Format] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "jsonl",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}


@dataclass(frozen=True, slots=True)
class RowError:
    """The reason that a row makes no job. `raw` is its text, truncated. `is_skipped`: it was not wanted."""

    code: str
    message: str
    raw: str = ""
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `number` counts from 1, bad rows included; exactly one of `fields` and `error` is set."""

    number: int
    fields: dict[str, Any] | None = None
    error: RowError | None = None
    shard: int = 0
    """The index of its file in a source of several."""
    shard_row: int = 0
    """Its number in that file; 0 where the source is one file."""
    images: tuple[Any, ...] = ()
    """Its pictures, as a client takes them (pictures.py); None for a missing one."""


class Source(Protocol):
    """A source of rows. It can be read more than once, with the same rows each time."""

    name: str

    def rows(self) -> Iterator[Row]: ...

    def count(self) -> int | None:
        """Return the number of rows, if it is cheap to determine."""
        ...


def open_source(path: Path | Stream, kind: Format | None = None, encoding: str = "utf-8") -> Source:
    """Return the source for a path or a stream, by its suffix or `kind`. Raises DatasetError."""
    if isinstance(path, Path):
        if path.is_dir():
            return ArrowSource(_dataset_files(path), str(path), _read_arrow_stream)
        if not path.exists():
            raise DatasetError(f"{path}: no such file")
    chosen = kind or SUFFIXES.get(data_suffix(path))
    check_supported(path)
    if compression(path) and chosen in ("parquet", "arrow"):
        raise DatasetError(f"{path}: {chosen} files are compressed in themselves; unpack it first")
    match chosen:
        case "jsonl":
            return JsonLinesSource(path, encoding)
        case "csv":
            return CsvSource(path, ",", encoding)
        case "tsv":
            return CsvSource(path, "\t", encoding)
        case "parquet":
            return ArrowSource([path], str(path), _read_parquet)
        case "arrow":
            return ArrowSource([path], str(path), _read_arrow_stream)
    raise DatasetError(
        f"{path}: the name does not show the format; add --format jsonl, csv, tsv, parquet or arrow"
    )


class JsonLinesSource:
    """One JSON object a line. Blank lines are skipped and have no number."""

    def __init__(self, path: Path | Stream, encoding: str = "utf-8") -> None:
        self.name = str(path)
        self._path = path
        self._encoding = encoding
        try:
            is_split_by_bytes = "\n".encode(encoding) == b"\n"
        except LookupError:
            raise DatasetError(f"unknown encoding {encoding!r}; try utf-8 or latin-1") from None
        if not is_split_by_bytes:
            raise DatasetError(f"{encoding} is not supported for JSON lines; convert the file to UTF-8 first")

    def rows(self) -> Iterator[Row]:
        number = 0
        for line in _lines(self._path):
            if line is not None and not line.strip():
                continue
            number += 1
            yield Row(number, *_parse_line(line, self._encoding))

    def count(self) -> int | None:
        if not _is_whole(self._path):
            return None
        return sum(line is None or bool(line.strip()) for line in _lines(self._path))


class CsvSource:
    """Comma-separated values with a header line; every value is text."""

    def __init__(self, path: Path | Stream, delimiter: str, encoding: str = "utf-8") -> None:
        self.name = str(path)
        self._path = path
        self._delimiter = delimiter
        self._encoding = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding

    def rows(self) -> Iterator[Row]:
        with self._reader() as reader:
            header = self._header(reader)
            number = 0
            while True:
                try:
                    values = next(reader)
                except StopIteration:
                    return
                except csv.Error as error:
                    number += 1
                    yield Row(number, error=RowError("invalid_csv", str(error)))
                    continue
                if not values:
                    continue
                number += 1
                yield self._row(number, header, values)

    def count(self) -> int | None:
        return sum(1 for _ in self.rows()) if _is_whole(self._path) else None

    def header(self) -> list[str]:
        """Return the columns' names. Raises DatasetError, EmptyFile for a file without a line."""
        with self._reader() as reader:
            return self._header(reader)

    @contextmanager
    def _reader(self) -> Iterator[Iterator[list[str]]]:
        # Undecodable bytes become lone surrogates, so that only their own row is refused.
        with reading(self._path) as raw:
            try:
                file = io.TextIOWrapper(raw, self._encoding, errors="surrogateescape", newline="")
            except LookupError:
                raise DatasetError(f"unknown encoding {self._encoding!r}; try utf-8 or latin-1") from None
            yield csv.reader(file, delimiter=self._delimiter, strict=True)

    def _header(self, reader: Iterator[list[str]]) -> list[str]:
        try:
            header = next(reader)
        except StopIteration:
            raise EmptyFile(f"{self.name} is empty: the first line must name the columns") from None
        except csv.Error as error:
            raise DatasetError(f"{self.name}: the header line is not CSV: {error}") from None
        repeated = {name for name in header if header.count(name) > 1}
        if repeated:
            raise DatasetError(f"{self.name}: columns appear twice: {', '.join(sorted(repeated))}")
        return header

    def _row(self, number: int, header: list[str], values: list[str]) -> Row:
        raw = shorten(self._delimiter.join(values))
        if len(values) != len(header):
            message = f"the row has {len(values)} fields, the header {len(header)}"
            return Row(number, error=RowError("invalid_csv", message, raw))
        if not all(map(is_unicode, values)):
            message = f"not {self._encoding.removesuffix('-sig')} text; name the file's --encoding"
            return Row(number, error=RowError("invalid_encoding", message, raw))
        return Row(number, dict(zip(header, values, strict=True)))


class ArrowSource:
    """Columnar files, read a batch at a time with pyarrow."""

    def __init__(
        self, paths: Sequence[Path | Stream], name: str, read: Callable[[Path | Stream], Iterator[Any]]
    ) -> None:
        self.name = name
        self._paths = paths
        self._read = read

    def rows(self) -> Iterator[Row]:
        number = 0
        for batch in self._batches():
            _check_names(self.name, batch.schema.names)
            for fields in arrow_rows(batch):
                number += 1
                yield checked_row(number, fields)

    def count(self) -> int | None:
        if self._read is _read_parquet:
            _require_pyarrow()
            from pyarrow import parquet

            total = 0
            for path in self._paths:
                with _arrow_errors(path):
                    total += int(parquet.read_metadata(_for_arrow(path)).num_rows)
            return total
        return sum(int(batch.num_rows) for batch in self._batches())

    def schema(self) -> Any:
        """Return the Arrow schema of the first file. Raises DatasetError."""
        with _arrow_errors(self._paths[0]):
            return self._read_schema(self._paths[0])

    def _read_schema(self, path: Path | Stream) -> Any:
        if self._read is _read_parquet:
            from pyarrow import parquet

            return parquet.read_schema(_for_arrow(path))
        with _open_arrow(path) as reader:
            return reader.schema

    def _batches(self) -> Iterator[Any]:
        for path in self._paths:
            with _arrow_errors(path):
                yield from self._read(path)


class MemorySource:
    """Rows from Python, such as a list of dicts. An iterator is read once: the journal spools it."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], name: str = "rows") -> None:
        self.name = name
        self._rows = rows

    @property
    def is_repeatable(self) -> bool:
        return not isinstance(self._rows, Iterator)

    def rows(self) -> Iterator[Row]:
        for number, fields in enumerate(self._rows, 1):
            yield checked_row(number, fields)

    def count(self) -> int | None:
        try:
            return len(self._rows)  # type: ignore[arg-type]
        except TypeError:
            return None


def _where(error: json.JSONDecodeError) -> str:
    return f"{error.msg.removesuffix(' at')} (character {error.pos + 1})"


def checked_row(number: int, fields: Any) -> Row:
    """Make a row of a mapping, with JSON values; see values.py."""
    if isinstance(fields, BadCells):
        return Row(number, error=RowError(fields.code, fields.message, shorten(fields.raw)))
    if not isinstance(fields, Mapping):
        kind = "null" if fields is None else type(fields).__name__
        message = f"a row must be an object with named fields, not {kind}"
        return Row(number, error=RowError("invalid_row", message, shorten(repr(fields))))
    try:
        return Row(number, plain_row(fields))
    except Exception as error:  # also of the types that data libraries raise in their conversions
        message = str(error) or type(error).__name__
        return Row(number, error=RowError("invalid_row", message, shorten(repr(fields))))


def _is_whole(path: Path | Stream) -> bool:
    """Return whether counting would wait for nothing."""
    return isinstance(path, Path) or path.is_whole


def _for_arrow(path: Path | Stream) -> Any:
    return path if isinstance(path, Path) else path.open()


def _lines(path: Path | Stream) -> Iterator[bytes | None]:
    """Yield the lines of a file; None for one that is too long."""
    with reading(path) as file:
        is_first = True
        while line := file.readline(MAX_LINE_BYTES):
            if is_first:
                line, is_first = line.removeprefix(b"\xef\xbb\xbf"), False
            if len(line) == MAX_LINE_BYTES and not line.endswith(b"\n"):
                while (rest := file.readline(MAX_LINE_BYTES)) and not rest.endswith(b"\n"):
                    pass
                yield None
            else:
                yield line


def _parse_line(line: bytes | None, encoding: str) -> tuple[dict[str, Any] | None, RowError | None]:
    if line is None:
        return None, RowError("payload_too_large", f"the line is longer than {MAX_LINE_BYTES >> 20} MiB")
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError as error:
        raw = shorten(line.decode(encoding, errors="replace").strip())
        message = f"not {encoding} text (byte {error.start}); name the file's --encoding"
        return None, RowError("invalid_encoding", message, raw)
    try:
        # Without the newline: after a truncated string, the error would be about a control character.
        fields = json.loads(text.rstrip("\r\n"), parse_constant=_refuse_constant, parse_float=number_of)
    except (ValueError, RecursionError) as error:
        reason = _where(error) if isinstance(error, json.JSONDecodeError) else str(error) or "nested too deep"
        return None, RowError("invalid_json", reason, shorten(text.strip()))
    row = checked_row(0, fields)
    if row.error is not None:
        return None, RowError(row.error.code, row.error.message, shorten(text.strip()))
    return row.fields, None


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def shorten(text: str) -> str:
    """Return `text` as quoted in the errors file."""
    clean = text.encode("utf-8", errors="replace").decode()
    return clean if len(clean) <= MAX_RAW_CHARACTERS else clean[:MAX_RAW_CHARACTERS] + " ..."


def _dataset_files(directory: Path) -> list[Path]:
    """Return the Arrow files that `datasets` wrote with save_to_disk."""
    state = directory / "state.json"
    if (directory / "dataset_dict.json").exists():
        splits = json.loads((directory / "dataset_dict.json").read_text()).get("splits", [])
        choices = ", ".join(str(directory / split) for split in splits)
        raise DatasetError(f"{directory} holds several splits; name one: {choices}")
    if not state.exists():
        raise DatasetError(f"{directory} is not a Hugging Face dataset directory (it has no state.json)")
    try:
        listed = json.loads(state.read_text())["_data_files"]
        return [directory / item["filename"] for item in listed]
    except (ValueError, KeyError, TypeError):
        raise DatasetError(f"{state} does not list the dataset's files") from None


def _check_names(name: str, columns: Sequence[str]) -> None:
    """Raise DatasetError for columns that a row cannot hold both."""
    if repeated := sorted(column for column, count in Counter(columns).items() if count > 1):
        raise DatasetError(f"{name}: columns appear twice: {', '.join(repeated)}")


def _require_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise DatasetError("Parquet and dataset directories need pyarrow: pip install 'pagemill[parquet]'")


def _read_parquet(path: Path | Stream) -> Iterator[Any]:
    from pyarrow import parquet

    file = parquet.ParquetFile(_for_arrow(path), pre_buffer=False, buffer_size=1 << 20)
    # Unbuffered, a whole row group would be read at once.
    size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    yield from file.iter_batches(batch_size=_batch_rows(size, file.metadata.num_rows))


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    """Return the rows to hold at once, of a file or batch of this size."""
    return max(1, min(ARROW_BATCH_ROWS, ARROW_BATCH_BYTES * max(1, num_rows) // max(1, num_bytes)))


@contextmanager
def _arrow_errors(path: Path | Stream) -> Iterator[None]:
    _require_pyarrow()
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path} cannot be read: {error}") from error


@contextmanager
def _open_arrow(path: Path | Stream) -> Iterator[Any]:
    import pyarrow

    with pyarrow.memory_map(str(path)) if isinstance(path, Path) else path.open() as file:
        try:
            reader = pyarrow.ipc.open_stream(file)
        except pyarrow.ArrowInvalid:
            reader = pyarrow.ipc.open_file(file)
        yield reader


def _read_arrow_stream(path: Path | Stream) -> Iterator[Any]:
    with _open_arrow(path) as reader:
        batches: Iterable[Any] = reader
        if hasattr(reader, "num_record_batches"):
            batches = (reader.get_batch(index) for index in range(reader.num_record_batches))
        for batch in batches:
            step = _batch_rows(batch.nbytes, batch.num_rows)
            for start in range(0, batch.num_rows, step):
                yield batch.slice(start, step)


csv.field_size_limit(MAX_LINE_BYTES)
