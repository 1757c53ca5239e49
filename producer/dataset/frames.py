"""Conversion of data frames to rows and back: pandas, polars, Arrow. None is imported unless the caller has one."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.tables.arrow_cells import BadCells, arrow_rows
from pagemill.producer.dataset.tables.rows import MemorySource, Row, Source, checked_row
from pagemill.producer.dataset.tables.shards import open_rows

if TYPE_CHECKING:
    from pagemill.producer.dataset.run import DatasetRun

CHUNK_ROWS = 1_024


class Frame(Protocol):
    """One library's frame, with positions counted from 0."""

    def columns(self) -> list[Any]: ...

    def size(self) -> int: ...

    def records(self, start: int, stop: int) -> Sequence[Mapping[str, Any] | BadCells]:
        """Return a slice of the rows."""
        ...

    def labeled(self, positions: list[int], columns: Mapping[str, list[Any]]) -> Any:
        """Return a new frame of these rows, with columns added."""
        ...


class FrameSource:
    """The rows of a data frame, converted a chunk at a time. Raises DatasetError for columns that no row can have."""

    def __init__(self, frame: Frame, name: str) -> None:
        self.name = name
        self.frame = frame
        columns = frame.columns()
        if odd := [column for column in columns if not isinstance(column, str)]:
            raise DatasetError(
                f"column names must be text, not {odd[0]!r}; rename them, in pandas: df.columns = df.columns.map(str)"
            )
        if repeated := [column for column, count in Counter(columns).items() if count > 1]:
            raise DatasetError(f"columns appear twice: {', '.join(repeated)}")

    def rows(self) -> Iterator[Row]:
        for start in range(0, self.frame.size(), CHUNK_ROWS):
            for index, fields in enumerate(self._records(start, start + CHUNK_ROWS), start + 1):
                yield checked_row(index, fields)

    def _records(self, start: int, stop: int) -> Iterable[Mapping[str, Any] | BadCells]:
        """Return a slice of the rows, one by one if the library cannot convert some of them."""
        try:
            return self.frame.records(start, stop)
        except BaseException as error:
            message = _conversion_error(error)
        if stop - start == 1:
            return [BadCells("invalid_row", message, "")]
        rows = range(start, min(stop, self.frame.size()))
        return chain.from_iterable(self._records(row, row + 1) for row in rows)

    def count(self) -> int | None:
        return self.frame.size()


def source_of(rows: object) -> Source:
    """Return the source for a path, a list of paths, a data frame or an iterable of mappings. Raises DatasetError."""
    if isinstance(rows, str | Path):
        return open_rows([rows])
    if isinstance(rows, list | tuple) and rows and all(isinstance(row, str | Path) for row in rows):
        return open_rows(rows)
    frame = _frame(rows)
    if frame is not None:
        return FrameSource(frame, type(rows).__name__)
    if isinstance(rows, Mapping):
        raise DatasetError("a mapping is one row: give a list of them, or a data frame for columns")
    if not isinstance(rows, Iterable) or isinstance(rows, bytes | bytearray):
        raise DatasetError(
            f"rows are a file's path, a data frame or an iterable of mappings, not {type(rows).__name__}"
        )
    return MemorySource(rows)


def labeled(source: FrameSource, run: DatasetRun, outputs: Mapping[int, Mapping[str, Any]]) -> Any:
    """Return a frame of the source's kind, with the rows in `outputs`, by their numbers, and their outputs."""
    numbers = sorted(outputs)
    names = [run.output_column, *run.more_columns]
    columns = {name: [outputs[number].get(name) for number in numbers] for name in names}
    return source.frame.labeled([number - 1 for number in numbers], columns)


def _conversion_error(error: BaseException) -> str:
    """Return the message of an error in a library's conversion; others are raised."""
    # Polars panics, which is not an Exception, for dates that Python does not support.
    if isinstance(error, Exception) or type(error).__name__ == "PanicException":
        return str(error) or type(error).__name__
    raise error


class _Pandas:
    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def columns(self) -> list[Any]:
        return list(self._frame.columns)

    def size(self) -> int:
        return len(self._frame)

    def records(self, start: int, stop: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._frame.iloc[start:stop].to_dict("records")
        return found

    def labeled(self, positions: list[int], columns: Mapping[str, list[Any]]) -> Any:
        import pandas

        taken = self._frame.iloc[positions]

        def kind(values: list[Any]) -> Any:
            known = {type(value) for value in values if value is not None}
            if known == {int} and None in values:  # as floats, large numbers would be rounded
                return (
                    "Int64"
                    if all(-(2**63) <= value < 2**63 for value in values if value is not None)
                    else object
                )
            return None if positions else object

        # By position, since an index may contain a label twice.
        return taken.assign(
            **{
                name: pandas.Series(values, index=taken.index, dtype=kind(values))
                for name, values in columns.items()
            }
        )


class _Polars:
    def __init__(self, frame: Any) -> None:
        self._frame = frame

    def columns(self) -> list[Any]:
        return list(self._frame.columns)

    def size(self) -> int:
        return int(self._frame.height)

    def records(self, start: int, stop: int) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self._frame.slice(start, stop - start).to_dicts()
        return found

    def labeled(self, positions: list[int], columns: Mapping[str, list[Any]]) -> Any:
        import polars

        def column(name: str, values: list[Any]) -> Any:
            try:
                # Not a Series, whose type depends on the first value.
                return polars.DataFrame([{name: value} for value in values], infer_schema_length=None)[name]
            except (TypeError, OverflowError, polars.exceptions.PolarsError):
                return polars.Series(name, _texts(values))

        return self._frame[positions].with_columns([column(*pair) for pair in columns.items()])


class _Arrow:
    def __init__(self, table: Any) -> None:
        self._table = table

    def columns(self) -> list[Any]:
        return list(self._table.schema.names)

    def size(self) -> int:
        return int(self._table.num_rows)

    def records(self, start: int, stop: int) -> list[dict[str, Any] | BadCells]:
        return list(arrow_rows(self._table.slice(start, stop - start)))

    def labeled(self, positions: list[int], columns: Mapping[str, list[Any]]) -> Any:
        import pyarrow

        taken = self._table.take(pyarrow.array(positions, pyarrow.int64()))
        for name, values in columns.items():
            try:
                column = pyarrow.array(values)
            except (pyarrow.ArrowException, OverflowError):
                column = pyarrow.array(_texts(values))
            if pyarrow.types.is_null(column.type):
                column = column.cast(pyarrow.string())
            taken = taken.append_column(name, column)
        return taken


def _frame(value: object) -> Frame | None:
    """Wrap a data frame; None for anything else."""
    pandas, polars, pyarrow = (sys.modules.get(name) for name in ("pandas", "polars", "pyarrow"))
    if pandas is not None and isinstance(value, pandas.DataFrame):
        return _Pandas(value)
    if polars is not None and isinstance(value, polars.LazyFrame):
        return _Polars(value.collect())
    if polars is not None and isinstance(value, polars.DataFrame):
        return _Polars(value)
    if pyarrow is not None and isinstance(value, pyarrow.RecordBatch):
        value = pyarrow.Table.from_batches([value])
    if pyarrow is not None and isinstance(value, pyarrow.Table):
        return _Arrow(value)
    return None


def _texts(values: Sequence[Any]) -> list[str | None]:
    """Return values of different types as text, in JSON if they are not text."""
    return [
        value if value is None or isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        for value in values
    ]
