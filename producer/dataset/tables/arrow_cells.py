"""Rows of Arrow tables as Python values. A cell without a Python value only affects its own row.

`to_pylist` fails for a whole batch: for a date after the year 9999, text that is not UTF-8, and, without pandas, times
with nanoseconds. Such batches are converted cell by cell.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from pagemill.producer.dataset.tables.values import plain_row


@dataclass(frozen=True, slots=True)
class BadCells:
    """A row without Python values: the code of its error, the reason, and the readable cells."""

    code: str
    message: str
    raw: str


def arrow_rows(table: Any) -> Iterator[dict[str, Any] | BadCells]:
    """Yield the rows of a record batch or a table."""
    if any(map(_has_nanosecond_times, table.schema.types)):
        yield from _cell_by_cell(table)
        return
    try:
        found: list[dict[str, Any]] = table.to_pylist()
    except Exception:  # of any type that Python's datetime, a codec or an extension type raises
        yield from _cell_by_cell(table)
        return
    yield from found


def _has_nanosecond_times(kind: Any) -> bool:
    """Return whether values of the type can contain a time of day in nanoseconds, which Arrow would round."""
    if str(kind) == "time64[ns]":
        return True
    inner = [getattr(kind, name) for name in ("value_type", "storage_type") if hasattr(kind, name)]
    fields = [kind.field(place).type for place in range(kind.num_fields)]
    return any(map(_has_nanosecond_times, inner + fields))


def _cell_by_cell(table: Any) -> Iterator[dict[str, Any] | BadCells]:
    columns = [_column(column) for column in table.columns]
    for cells in zip(*columns, strict=True):
        row = dict(zip(table.schema.names, cells, strict=True))
        bad = {name: cell for name, cell in row.items() if isinstance(cell, _Unreadable)}
        if not bad:
            yield row
            continue
        name, first = next(iter(bad.items()))
        good = {name: cell for name, cell in row.items() if name not in bad}
        yield BadCells(first.code, f"column {name!r}: {first.reason}", _as_json(good))


@dataclass(frozen=True, slots=True)
class _Unreadable:
    code: str
    reason: str


def _column(column: Any) -> list[Any]:
    if _has_nanosecond_times(column.type):
        return [_checked(scalar) for scalar in column]
    try:
        found: list[Any] = column.to_pylist()
    except Exception:
        return [_checked(scalar) for scalar in column]
    return found


def _checked(scalar: Any) -> Any:
    try:
        return _value(scalar)
    except UnicodeDecodeError as error:
        return _Unreadable("invalid_encoding", f"not UTF-8 text (byte {error.start})")
    except KeyError as error:  # of zoneinfo or pytz
        return _Unreadable(
            "invalid_row", f"unknown time zone {error}; install tzdata, or convert the column to UTC"
        )
    except Exception as error:
        return _Unreadable("invalid_row", str(error) or type(error).__name__)


def _value(scalar: Any) -> Any:
    """Return the value of a scalar. Times with nanoseconds become text, as pandas would write them."""
    if not scalar.is_valid:
        return None
    kind = scalar.type
    try:
        if _has_nanosecond_times(kind):
            raise ValueError("the value has nanoseconds")
        return scalar.as_py()
    except Exception:
        import pyarrow

        if isinstance(scalar, pyarrow.MapScalar):
            return [[_value(part) for part in item.values()] for item in scalar.values]
        if isinstance(scalar, pyarrow.ListScalar):
            return [_value(item) for item in scalar.values]
        if isinstance(scalar, pyarrow.StructScalar) and len(set(scalar.keys())) == len(scalar):
            return {name: _value(item) for name, item in scalar.items()}
        inner = getattr(scalar, "value", None)
        if isinstance(inner, pyarrow.Scalar):  # for a dictionary, a run, a union or an extension
            return _value(inner)
        if convert := _NANOSECONDS.get((type(scalar).__name__, getattr(kind, "unit", ""))):
            return convert(scalar)
        raise


def _timestamp(scalar: Any) -> str:
    import pyarrow

    micros, nanos = divmod(scalar.value, 1_000)
    return _with_nanos(pyarrow.scalar(micros, pyarrow.timestamp("us", scalar.type.tz)).as_py(), nanos)


def _time(scalar: Any) -> str:
    import pyarrow

    micros, nanos = divmod(scalar.value, 1_000)
    return _with_nanos(pyarrow.scalar(micros, pyarrow.time64("us")).as_py(), nanos)


def _with_nanos(rounded: datetime.datetime | datetime.time, nanos: int) -> str:
    if not nanos:
        return rounded.isoformat()
    text = rounded.isoformat(timespec="microseconds")
    place = text.index(".") + 7
    return f"{text[:place]}{nanos:03}{text[place:]}"


_NANOSECONDS: dict[tuple[str, str], Callable[[Any], Any]] = {
    ("TimestampScalar", "ns"): _timestamp,
    ("Time64Scalar", "ns"): _time,
    ("DurationScalar", "ns"): lambda scalar: scalar.value / 1e9,
}
"""Conversions of scalars for which only pandas has a Python type, by the scalar's class and unit."""


def _as_json(good: dict[str, Any]) -> str:
    try:
        return json.dumps(plain_row(good), ensure_ascii=False)
    except ValueError:
        return repr(good)
