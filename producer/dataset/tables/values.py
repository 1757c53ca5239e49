"""JSON values of a row's cells, from the values of data libraries.

Dates and times become ISO text, durations seconds, decimals and UUIDs text, bytes base64, arrays lists; NaN, NaT, NA
and infinities become null. Nothing is imported: values of numpy, pandas, polars and pyarrow are recognized by shape.
"""

from __future__ import annotations

import base64
import datetime
import decimal
import math
import uuid
from collections.abc import Mapping
from typing import Any

from pagemill.common.json_values import is_unicode

MAX_DEPTH = 64
MAX_INTEGER_BITS = 14_000
"""Python does not convert numbers of more than 4,300 digits to text."""
_MISSING_TYPES = frozenset({"NAType", "NaTType"})
"""pandas' classes of missing values; NaT would otherwise count as a datetime."""


def plain_row(fields: Mapping[Any, Any]) -> dict[str, Any]:
    """Return a row with JSON values. Raises ValueError for a value or a column name without a JSON form."""
    return _plain_object(fields, MAX_DEPTH + 1)


def number_of(text: str) -> float | str:
    """Return the float of a JSON literal; its text if it exceeds 64 bits, so that no field treats it as a number."""
    number = float(text)
    return number if math.isfinite(number) else text


def _plain_object(fields: Mapping[Any, Any], depth: int) -> dict[str, Any]:
    return {_name(name): _plain(value, depth - 1) for name, value in fields.items()}


def _name(name: Any) -> str:
    if not isinstance(name, str) or not is_unicode(name):
        raise ValueError("column names must be text")
    return name


def _plain(value: Any, depth: int) -> Any:
    if depth <= 0:
        raise ValueError("nested too deep")
    match value:
        case None | bool():
            return value
        case int():
            if value.bit_length() > MAX_INTEGER_BITS:
                raise ValueError(f"a number of more than {MAX_INTEGER_BITS:,} bits")
            return int(value)
        case str():
            if not is_unicode(value):
                raise ValueError("text with lone surrogates")
            return str.__str__(value)  # for an enumeration, the value
        case float():
            return float(value) if math.isfinite(value) else None
        case Mapping():
            return _plain_object(value, depth)
        case list() | tuple():
            return [_plain(item, depth - 1) for item in value]
        case _ if type(value).__name__ in _MISSING_TYPES:
            return None
        case bytes() | bytearray() | memoryview():
            return base64.b64encode(value).decode()
        case datetime.datetime() | datetime.date() | datetime.time():
            return value.isoformat()
        case datetime.timedelta():
            return value.total_seconds()
        case decimal.Decimal():
            return str(value) if value.is_finite() else None
        case uuid.UUID():
            return str(value)
    return _plain_foreign(value, depth)


def _plain_foreign(value: Any, depth: int) -> Any:
    """Convert a scalar or an array of a data library."""
    if getattr(value, "ndim", 0):  # an array, or a Series
        return [_plain(item, depth - 1) for item in value]
    kind = getattr(getattr(value, "dtype", None), "kind", "")
    if kind in ("M", "m"):  # `item` would lose the unit
        if value != value:
            return None
        return str(value) if kind == "M" else int(value.astype("timedelta64[ns]").astype("int64")) / 1e9
    for name in ("to_list", "to_pylist", "as_py", "item"):  # polars; Arrow, twice; a scalar of numpy
        if callable(method := getattr(value, name, None)):
            return _plain(method(), depth - 1)
    raise ValueError(f"a value of type {type(value).__name__} is not JSON")
