"""Bounds of values, as metadata of `Annotated` types. Pydantic enforces them when it validates the class."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_origin, get_type_hints

if TYPE_CHECKING:
    from pydantic import GetCoreSchemaHandler
    from pydantic_core import CoreSchema


MODEL_NAME = re.compile(r"[A-Za-z0-9._@:/+-]{1,128}")
"""Valid names of served models: the name is part of keys in Redis."""
MODEL_NAME_RULE = "a served model's name is 1 to 128 of the characters A-Z a-z 0-9 . _ @ : / + -"
ADAPTER_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""Valid names of adapters."""
ADAPTER_NAME_RULE = "an adapter's name is 1 to 64 of the characters A-Z a-z 0-9 . _ -"
REVISION_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
REVISION_NAME_RULE = "a revision is 1 to 64 of the characters A-Z a-z 0-9 . _ -"


class InvalidParameter(ValueError):
    """A parameter is out of bounds, or contradicts another one. `code` is a job's error code."""

    def __init__(self, message: str, code: str = "invalid_job") -> None:
        super().__init__(message)
        self.code = code


@dataclass(frozen=True, slots=True)
class Range:
    """Numbers from `low` to `high`, both included; `above` excludes `low`. NaN is always outside."""

    low: float
    high: float
    above: bool = False

    def __contains__(self, value: Any) -> bool:
        return bool(self.low < value <= self.high if self.above else self.low <= value <= self.high)

    def __str__(self) -> str:
        return f"{'(' if self.above else '['}{self.low:g}, {self.high:g}]"

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        number = int if source is int else float
        return {**schema, "gt" if self.above else "ge": number(self.low), "le": number(self.high)}


@dataclass(frozen=True, slots=True)
class Length:
    """Items of a list or characters of a string, both ends included. Only checked on the wire."""

    low: int
    high: int

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        return {**schema, "min_length": self.low, "max_length": self.high}


@dataclass(frozen=True, slots=True)
class Exact:
    """A value of exactly this type: strings and bools are not converted to numbers, and none is infinite."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        schema: Any = handler(source)
        finite = {"allow_inf_nan": False} if source is float else {}
        return {**schema, "strict": True, **finite}


def check_ranges(fields: object) -> None:
    """Check the ranges of the numbers among an object's fields. Raises InvalidParameter."""
    kind: Any = type(fields)
    for name, bound in _ranges(kind):
        value = getattr(fields, name)
        if value is not None and value not in bound:
            raise InvalidParameter(f"{name} must be in {bound}, got {value}")


@cache
def _ranges(kind: Any) -> tuple[tuple[str, Range], ...]:
    """Return the ranges of a class's numeric fields, optional ones included."""
    return tuple(
        (name, bound)
        for name, hint in get_type_hints(kind, include_extras=True).items()
        for option in ((hint,) if get_origin(hint) is Annotated else get_args(hint))
        for bound in getattr(option, "__metadata__", ())
        if isinstance(bound, Range)
    )
