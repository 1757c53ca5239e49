"""Rows of a dataset, read one at a time: JSONL, CSV, Parquet, a Hugging Face dataset directory, any iterable.

An unreadable row becomes a row with an error: it keeps its number and the run continues.
"""

from __future__ import annotations

import codecs
import csv
import importlib.util
import io
import json
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol, Self, TypeAlias, TypedDict, Unpack, cast

from pagemill.common.json_values import is_unicode
from pagemill.producer.dataset.errors import DatasetError, EmptyFile
from pagemill.producer.dataset.tables.arrow_cells import BadCells, arrow_rows
from pagemill.producer.dataset.tables.compressed import (
    check_supported,
    compression,
    compression_of,
    data_suffix,
    reading,
)
from pagemill.producer.dataset.tables.streams import Stream
from pagemill.producer.dataset.tables.values import number_of, plain_row

MAX_LINE_BYTES = 64 << 20
"""Maximum length of a line; a longer one is skipped as one bad row, without being held in memory."""
MAX_RAW_CHARACTERS = 2_000
"""Maximum characters of a bad row that the errors file quotes."""
ARROW_BATCH_ROWS = 1_024
ARROW_BATCH_BYTES = 16 << 20
"""Rows with images are read in smaller batches."""

Format: TypeAlias = Literal["jsonl", "csv", "tsv", "parquet", "arrow"]
Quoting: TypeAlias = Literal["standard", "none", "own"]
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
    """The reason that a row makes no job. `raw` is its text, truncated. `is_skipped`: it was not selected."""

    code: str
    message: str
    raw: str = ""
    is_skipped: bool = False


@dataclass(frozen=True, slots=True)
class Row:
    """One row. `number` counts from 1, including bad rows; exactly one of `fields` and `error` is set."""

    number: int
    fields: dict[str, Any] | None = None
    error: RowError | None = None
    shard: int = 0
    """The index of its file in a source of several."""
    shard_row: int = 0
    """Its number in that file; 0 if the source is one file."""
    images: tuple[Any, ...] = ()
    """Its images, in the form that clients accept (pictures.py); None for a missing one."""


class Source(Protocol):
    """A source of rows. It can be read more than once, with the same rows each time."""

    name: str

    def rows(self) -> Iterator[Row]: ...

    def count(self) -> int | None:
        """Return the number of rows, if it is cheap to determine."""
        ...


class CsvOptions(TypedDict, total=False):
    """The format of a CSV or TSV file. None: the default.

    `quoting`: `none` treats quotes as text; `own` is for a file that a run has written, without stray quotes.
    """

    delimiter: str | None
    quoting: Quoting | None


def open_source(
    path: Path | Stream, kind: Format | None = None, encoding: str = "utf-8", **options: Unpack[CsvOptions]
) -> Source:
    """Return the source for a path or a stream, by its suffix or `kind`. Raises DatasetError."""
    if isinstance(path, Path):
        if path.is_dir():
            return ArrowSource(_dataset_files(path), str(path), _read_arrow_stream)
        if not path.exists():
            raise DatasetError(f"{path}: no such file")
        if not path.is_file():  # the rows of a pipe can be read only once
            raise DatasetError(
                f"{path} is not a regular file; give - as the name and pipe the rows to standard input"
            )
    chosen = kind or SUFFIXES.get(data_suffix(path))
    check_supported(path)
    if compression(path) and chosen in ("parquet", "arrow"):
        raise DatasetError(f"{path}: {chosen} files are compressed in themselves; unpack it first")
    named = [name for name, value in options.items() if value and value != "own"]
    if chosen not in ("csv", "tsv", None) and named:
        raise DatasetError(f"--{named[0]} is only for CSV and TSV files, not for {path}")
    match chosen:
        case "jsonl":
            return JsonLinesSource(path, encoding)
        case "csv" | "tsv":
            return CsvSource(path, chosen, encoding, **options)
        case "parquet":
            return ArrowSource([path], str(path), _read_parquet)
        case "arrow":
            return ArrowSource([path], str(path), _read_arrow_stream)
    raise DatasetError(
        f"{path}: the name does not show the format; add --format jsonl, csv, tsv, parquet or arrow"
    )


class JsonLinesSource:
    """One JSON object per line. Blank lines are skipped and have no number."""

    def __init__(
        self, path: Path | Stream, encoding: str = "utf-8", remedy: str = "name the file's --encoding"
    ) -> None:
        """`remedy`: advice for text in another encoding."""
        self.name = str(path)
        self._path = path
        self._encoding = encoding
        self._remedy = remedy
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
            if number == 1 and line is not None:
                self._check_first(line)
            yield Row(number, *_parse_line(line, self._encoding, self._remedy))

    def _check_first(self, line: bytes) -> None:
        """Raise DatasetError for a file that is not JSON lines at all."""
        _check_unpacked(self.name, line)
        if found := wide_encoding(line[:4]):
            raise DatasetError(f"{self.name} is {found} text; convert it to UTF-8 first")
        if re.match(rb"\s*(\[\s*(\{|$)|\{\s*$)", line):
            raise DatasetError(
                f"{self.name} is one JSON value, not one per line. For an array of rows: "
                "jq -c '.[]' FILE > FILE.jsonl"
            )

    def count(self) -> int | None:
        if not _is_whole(self._path):
            return None
        return sum(line is None or bool(line.strip()) for line in _lines(self._path))


class CsvSource:
    """Delimited values with a header line; every value is text.

    A quoted field may hold line breaks. `joined` describes the rows with several lines, once all have been read.
    """

    def __init__(
        self, path: Path | Stream, kind: Format, encoding: str = "utf-8", **options: Unpack[CsvOptions]
    ) -> None:
        self.name = str(path)
        self.joined = Joined()
        self._path = path
        self._encoding = "utf-8-sig" if encoding.lower() in ("utf-8", "utf8") else encoding
        self._given = options.get("delimiter")
        self._delimiter = self._given or ("\t" if kind == "tsv" else ",")
        self._has_quotes = options.get("quoting") != "none"
        self._has_stray_quotes = self._delimiter == "\t" and options.get("quoting") != "own"

    def rows(self) -> Iterator[Row]:
        with self._reader() as lines:
            header = self._header(lines)
            joined, number = Joined(), 0
            for values in lines.records():
                if isinstance(values, list) and not values:
                    continue
                number += 1
                row = self._row(number, header, values, lines)
                if len(lines.taken) > 1:
                    joined.add(lines.first, lines.number)
                yield row
            self.joined = joined

    def count(self) -> int | None:
        return sum(1 for _ in self.rows()) if _is_whole(self._path) else None

    def header(self) -> list[str]:
        """Return the columns' names. Raises DatasetError, EmptyFile for a file without a line."""
        with self._reader() as lines:
            return self._header(lines)

    @contextmanager
    def _reader(self) -> Iterator[CsvLines]:
        # Undecodable bytes become lone surrogates, so that only their own row is rejected.
        with reading(self._path) as raw:
            try:
                file = io.TextIOWrapper(raw, self._encoding, errors="surrogateescape", newline="")
            except LookupError:
                raise DatasetError(f"unknown encoding {self._encoding!r}; try utf-8 or latin-1") from None
            start = cast("io.BufferedReader", raw).peek(4)[:4]
            _check_unpacked(self.name, start)
            if (found := wide_encoding(start)) and b"\0" not in "\n".encode(self._encoding):
                raise DatasetError(f"{self.name} is {found} text: add --encoding {found}")
            try:
                yield CsvLines(_text_lines(file), self._delimiter, has_quotes=self._has_quotes)
            except UnicodeError as error:
                raise DatasetError(f"{self.name} is not {self._encoding} text: {error}") from None

    def _header(self, lines: CsvLines) -> list[str]:
        header = next((record for record in lines.records() if record != []), None)
        if header is None:
            raise EmptyFile(f"{self.name} is empty: the first line must name the columns")
        if isinstance(header, csv.Error):
            raise DatasetError(f"{self.name}: the header line is not CSV: {header}")
        header[:1] = [name.removeprefix("\ufeff") for name in header[:1]]
        if not all(map(is_unicode, header)):
            raise DatasetError(f"{self.name}: the header line is {self._not_text()}")
        others = [mark for mark in ",;\t|" if len(header) == 1 and mark in header[0]]
        if others and self._given is None:
            other, own = (repr(mark).replace("'", '"') for mark in (others[0], self._delimiter))
            raise DatasetError(
                f"{self.name} has one column, {header[0]!r}: add --delimiter {other}, or if that is one name "
                f"--delimiter {own}"
            )
        # Excel writes further delimiters if a sheet has empty columns on the right.
        while len(header) > 1 and not header[-1]:
            header.pop()
        if unnamed := [str(place) for place, name in enumerate(header, 1) if not name][1:]:
            raise DatasetError(f"{self.name}: the header has no name for column {', '.join(unnamed)}")
        _check_names(self.name, header)
        return header

    def _row(self, number: int, header: list[str], values: list[str] | csv.Error, lines: CsvLines) -> Row:
        if isinstance(values, csv.Error):
            is_open = len(lines.taken) > 1 or str(values) == "unexpected end of data"
            reason = "a quote that opens here is not closed" if is_open else str(values)
            remedy = _QUOTES_ARE_TEXT if self._has_quotes and reason != _LONG_LINE else ""
            return lines.bad(number, "invalid_csv", reason + remedy)
        surplus = values[len(header) :]
        if len(values) < len(header) or any(surplus):
            message = f"the row has {len(values)} fields, the header {len(header)}"
            return lines.bad(number, "invalid_csv", message, is_one_row=self._delimiter != "\t")
        values = values[: len(header)]
        if self._has_stray_quotes and len(lines.taken) > 1 and any(map(_holds_rows, values)):
            message = f"a quote that opens here closes in line {lines.number}{_QUOTES_ARE_TEXT}"
            return lines.bad(number, "invalid_csv", message)
        if not all(map(is_unicode, values)):
            return lines.bad(number, "invalid_encoding", self._not_text(), is_one_row=True)
        return Row(number, dict(zip(header, values, strict=True)))

    def _not_text(self) -> str:
        return f"not {self._encoding.removesuffix('-sig')} text; name the file's --encoding"


_QUOTES_ARE_TEXT = "; if quotes are text, add --quoting none"
_LONG_LINE = f"the line is longer than {MAX_LINE_BYTES >> 20} MiB"


def _holds_rows(value: str) -> bool:
    """Return whether all further lines of a TSV field have tabs: they are rows that a stray quote joined."""
    _, *further = re.split(r"\r\n?|\n", value)
    return bool(further) and all("\t" in line for line in further)


@dataclass(slots=True)
class Joined:
    """Rows of a CSV file with several lines. `first` and `last`: the lines of the first of them."""

    count: int = 0
    first: int = 0
    last: int = 0

    def __str__(self) -> str:
        rows = "1 row has" if self.count == 1 else f"{self.count:,} rows have"
        return f"{rows} several lines, joined by quotes (first: lines {self.first} to {self.last}){_QUOTES_ARE_TEXT}"

    def add(self, first: int, last: int) -> None:
        """Count a row."""
        if not self.count:
            self.first, self.last = first, last
        self.count += 1


class CsvLines:
    """The lines of a CSV file as records with line numbers."""

    def __init__(self, file: Iterable[str], delimiter: str, *, has_quotes: bool) -> None:
        self._file = iter(file)
        self._again: list[str] = []
        """Lines to read again, the last first."""
        self.taken: list[str] = []
        """The lines of the current record."""
        self.number = 0
        """The number of its last line."""
        quoting: Any = csv.QUOTE_MINIMAL if has_quotes else csv.QUOTE_NONE
        self._csv = csv.reader(self, delimiter=delimiter, quoting=quoting, strict=True)

    @property
    def first(self) -> int:
        """The number of the current record's first line."""
        return self.number - len(self.taken) + 1

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> str:
        line = self._again.pop() if self._again else next(self._file)
        self.taken.append(line)
        self.number += 1
        if len(line) > MAX_LINE_BYTES:
            raise csv.Error(_LONG_LINE)
        return line

    def records(self) -> Iterator[list[str] | csv.Error]:
        """Yield each record's values, or the error of an invalid record."""
        while True:
            self.taken = []
            try:
                yield next(self._csv)
            except StopIteration:
                return
            except csv.Error as error:
                yield error

    def bad(self, number: int, code: str, message: str, *, is_one_row: bool = False) -> Row:
        """Return the current record as a bad row: its first line, and the others are read again.

        `is_one_row`: all of its lines.
        """
        first, last = self.first, self.number
        if not is_one_row:
            self._again += reversed(self.taken[1:])
            self.taken, self.number, last = self.taken[:1], first, first
        place = f"line {first}" if first == last else f"lines {first} to {last}"
        raw = "".join(self.taken).rstrip("\r\n")
        return Row(number, error=RowError(code, f"{place}: {message}", shorten(raw)))


def _check_unpacked(name: str, start: bytes) -> None:
    """Raise DatasetError for compressed data in a file whose name does not show it."""
    if kind := compression_of(start)[0]:
        raise DatasetError(f"{name} is {kind} data, not text; decompress it first")


def wide_encoding(start: bytes) -> str | None:
    """Return the encoding of text of 16 or 32 bits per character, by its first four bytes."""
    marks = {codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32"}
    marks |= {codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16"}
    found = next((name for mark, name in marks.items() if start.startswith(mark)), None)
    if found is None and len(start) == 4 and start.count(0) in (2, 3):
        width, order = (32, start[0] == 0) if start.count(0) == 3 else (16, start[0] == 0)
        return f"utf-{width}-{'be' if order else 'le'}"
    return found


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
                for batch in self._read(path):
                    _check_names(str(path), batch.schema.names)
                    yield batch


class MemorySource:
    """Rows from Python. Only a list, or another indexed collection, is read again: the journal spools others."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], name: str = "rows") -> None:
        self.name = name
        self._rows = rows

    @property
    def is_repeatable(self) -> bool:
        return hasattr(self._rows, "__len__") and hasattr(self._rows, "__getitem__")

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
    """Return a mapping as a row with JSON values; see values.py."""
    if isinstance(fields, BadCells):
        return Row(number, error=RowError(fields.code, fields.message, shorten(fields.raw)))
    if not isinstance(fields, Mapping):
        kind = "null" if fields is None else type(fields).__name__
        message = f"a row must be an object with named fields, not {kind}"
        return Row(number, error=RowError("invalid_row", message, _repr_of(fields)))
    try:
        return Row(number, plain_row(fields))
    except Exception as error:  # also of types that data libraries raise in their conversions
        message = str(error) or type(error).__name__
        return Row(number, error=RowError("invalid_row", message, _repr_of(fields)))


def _repr_of(fields: Any) -> str:
    """Return Python's representation of a row, or its type if there is none."""
    try:
        return shorten(repr(fields))
    except Exception:  # for a number with too many digits, or a foreign value
        return f"<{type(fields).__name__}>"


def _is_whole(path: Path | Stream) -> bool:
    """Return whether counting would not have to wait."""
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


def _text_lines(file: io.TextIOWrapper) -> Iterator[str]:
    """Yield the lines of a text file; of one that is too long, one character more than allowed."""
    while line := file.readline(MAX_LINE_BYTES + 1):
        rest = line
        while len(rest) > MAX_LINE_BYTES and not rest.endswith(("\n", "\r")):
            rest = file.readline(MAX_LINE_BYTES + 1)
        yield line


def _parse_line(
    line: bytes | None, encoding: str, remedy: str
) -> tuple[dict[str, Any] | None, RowError | None]:
    if line is None:
        return None, RowError("payload_too_large", _LONG_LINE)
    try:
        text = line.decode(encoding)
    except UnicodeDecodeError as error:
        raw = shorten(line.decode(encoding, errors="replace").strip())
        message = f"not {encoding} text (byte {error.start}); {remedy}"
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
    """Raise DatasetError for columns that a row cannot have together."""
    if repeated := sorted(column for column, count in Counter(columns).items() if count > 1):
        raise DatasetError(f"{name}: columns appear twice: {', '.join(repeated)}")


def _require_pyarrow() -> None:
    if importlib.util.find_spec("pyarrow") is None:
        raise DatasetError("Parquet and dataset directories need pyarrow: pip install 'pagemill[parquet]'")


def _read_parquet(path: Path | Stream) -> Iterator[Any]:
    from pyarrow import parquet

    file = parquet.ParquetFile(_for_arrow(path), pre_buffer=False, buffer_size=1 << 20)
    # Without buffering, a complete row group would be read at once.
    size = sum(file.metadata.row_group(number).total_byte_size for number in range(file.num_row_groups))
    yield from file.iter_batches(batch_size=_batch_rows(size, file.metadata.num_rows))


def _batch_rows(num_bytes: int, num_rows: int) -> int:
    """Return the number of rows of a file or batch of this size to hold together."""
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
