"""The types of Parquet columns, found from JSON values: the narrowest that holds every value of the column.

Arrow's own inference only reads as many values as necessary, so that a write can fail after the work has been done. A
column without a type that holds all its values is text, with values other than text as JSON.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

MAX_DEPTH = 24
"""Maximum levels of lists and objects; Parquet's readers accept a schema of 100 levels, of which a list takes three."""
MAX_FIELDS = 1_000
"""Maximum fields of an object's type. An object with more becomes a map, whose keys are data."""
_EXACT = 1 << 53
"""The largest value up to which a float64 represents every integer."""


@dataclass(slots=True)
class ColumnType:
    """The known properties of the values of a column, of a list's items or of an object's field."""

    kinds: set[type] = field(default_factory=set)
    low: int = 0
    high: int = 0
    items: ColumnType | None = None
    fields: dict[str, ColumnType] = field(default_factory=dict)

    def add(self, values: Sequence[Any]) -> None:
        """Take further values into account."""
        by_kind: dict[type, list[Any]] = {kind: [] for kind in set(map(type, values)) - {type(None)}}
        self.kinds |= by_kind.keys()
        for kind in by_kind.keys() & {int, list, dict}:
            by_kind[kind] = [value for value in values if type(value) is kind]
        if ints := by_kind.get(int):
            self.low, self.high = min(self.low, min(ints)), max(self.high, max(ints))
        if lists := by_kind.get(list):
            self.items = self.items or ColumnType()
            self.items.add(list(chain.from_iterable(lists)))
        for name, given in _by_name(by_kind.get(dict, ())).items():
            if len(self.fields) <= MAX_FIELDS:
                self.fields.setdefault(name, ColumnType()).add(given)

    def arrow(self, depth: int = MAX_DEPTH) -> Any:
        """Return the Arrow type; None if no type holds all values."""
        import pyarrow

        if not self.kinds:
            return pyarrow.null()
        if self.kinds == {int}:
            return self._integer()
        if self.kinds == {int, float}:
            return pyarrow.float64() if self.low >= -_EXACT and self.high <= _EXACT else None
        if len(self.kinds) > 1 or not depth:
            return None
        (kind,) = self.kinds
        if kind is list:
            assert self.items is not None
            inner = self.items.arrow(depth - 1)
            return None if inner is None else pyarrow.list_(inner)
        if kind is dict:
            return self._object(depth)
        return {bool: pyarrow.bool_(), float: pyarrow.float64(), str: pyarrow.string()}.get(kind)

    def _integer(self) -> Any:
        import pyarrow

        if self.low >= -(1 << 63) and self.high < 1 << 63:
            return pyarrow.int64()
        return pyarrow.uint64() if self.low >= 0 and self.high < 1 << 64 else None

    def _object(self, depth: int) -> Any:
        """Return a struct; Parquet does not support structs without fields."""
        import pyarrow

        fields = {name: known.arrow(depth - 1) for name, known in self.fields.items()}
        if not fields or len(fields) > MAX_FIELDS or any(kind is None for kind in fields.values()):
            return None
        return pyarrow.struct(list(fields.items()))


def column_types(
    rows: Iterable[Mapping[str, Any]], left_out: Iterable[str], chunk_rows: int
) -> dict[str, Any]:
    """Return the Arrow type of each column except those `left_out`, by reading all rows; None for JSON text."""
    known: dict[str, ColumnType] = {}
    chunk: list[Mapping[str, Any]] = []

    def grow() -> None:
        for name, values in _by_name(chunk).items():
            known.setdefault(name, ColumnType()).add(values)
        chunk.clear()

    for row in rows:
        chunk.append(row)
        if len(chunk) == chunk_rows:
            grow()
    grow()
    ignored = set(left_out)
    return {name: column.arrow() for name, column in known.items() if name not in ignored}


def _by_name(objects: Iterable[Mapping[str, Any]]) -> dict[str, list[Any]]:
    values: dict[str, list[Any]] = {}
    for one in objects:
        for name, value in one.items():
            values.setdefault(name, []).append(value)
    return values


def fitted(value: Any, kind: str) -> Any:
    """Return a value for a column of a JSON schema's type; None if the column cannot hold it."""
    if kind == "boolean":
        return value if isinstance(value, bool) else None
    if kind == "string":
        return value if isinstance(value, str) else None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        if kind != "integer":
            return float(value)
        whole = int(value)
    except (OverflowError, ValueError):
        return None
    return whole if whole == value and -(1 << 63) <= whole < 1 << 63 else None
