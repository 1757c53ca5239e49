"""Error messages for a job's fields. They never quote its input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from pagemill.common.bounds import InvalidParameter
from pagemill.producer.wire.schema.errors import InvalidJob

_CHAT_SHAPE = (
    'a chat is a list of messages like {"role": "user", "content": "..."}; '
    "a single text is a prompt=, or the content of one message"
)
_NAMES_OF_TYPES = {"Tuple": "List", "a dictionary": "an object", "dictionary": "object"}
"""Maps Python's type names to JSON's."""
_UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
"""Pydantic's types of errors for members that an object does not have."""


def invalid_job(error: ValidationError, kind: type[BaseModel], others: Iterable[str] = ()) -> InvalidJob:
    """Return the error that lists every reason, with its place.

    Args:
        kind: the model that was validated.
        others: further names that its fields may have.
    """
    complaints = _complaints(error, kind)
    fields = {*kind.model_fields, *others}
    reasons = _reasons(complaints, others)
    param = next((complaint.place for complaint in complaints if complaint.place), None)
    if param is None and (first := re.match(r"\w+", reasons)) and first[0] in fields:
        param = first[0]
    return InvalidJob(reasons, _code(error), param)


def _code(error: ValidationError) -> str:
    """Return the code of the first validation error that has a specific one."""
    causes = (
        item.get("ctx", {}).get("error") for item in error.errors(include_input=False, include_url=False)
    )
    codes = (cause.code for cause in causes if isinstance(cause, InvalidParameter))
    return next((code for code in codes if code != "invalid_job"), "invalid_job")


@dataclass(frozen=True, slots=True)
class _Complaint:
    item: ErrorDetails
    place: str
    """Its location, without pydantic's names for the alternatives of a field."""
    known: Sequence[str]
    """The fields of the object at the location."""
    is_alternative: bool
    """True if the location ends with an alternative: the value has another type, or is not one of its values."""


def _complaints(error: ValidationError, kind: type[BaseModel]) -> list[_Complaint]:
    """Return the validation errors, without those about alternatives of other types than the value's."""
    found = [
        _complaint(item, kind)
        for item in error.errors(include_input=False, include_url=False, include_context=False)
    ]
    fitting = [
        other.item["loc"]
        for other in found
        if not (other.is_alternative and _is_mismatch(other.item["type"]))
    ]

    def is_beside(loc: tuple[int | str, ...]) -> bool:
        others = [other for other in fitting if len(other) >= len(loc) and other[: len(loc) - 1] == loc[:-1]]
        return any(other[len(loc) - 1] != loc[-1] for other in others)

    return [
        one
        for one in found
        if not (one.is_alternative and _is_mismatch(one.item["type"]) and is_beside(one.item["loc"]))
    ]


def _is_mismatch(kind: str) -> bool:
    return kind.endswith("_type") or kind == "literal_error"


def _complaint(item: ErrorDetails, kind: type[BaseModel]) -> _Complaint:
    """Follow the location through the types of the fields."""
    loc = _without_kinds_of_content(item["loc"])
    is_unknown = item["type"] in _UNKNOWN
    parts, types, is_alternative = [], list(_alternatives(kind)), False
    for number, part in enumerate(loc):
        members = [member for one in types for member in _members(one, part)]
        is_alternative = not members and not (is_unknown and number == len(loc) - 1)
        if is_alternative:
            types = [one for one in types if getattr(one, "__name__", "") == part] or types
            continue
        parts.append(str(part))
        if members:
            types = members
    known = [name for one in types for name in _fields(one)]
    return _Complaint(item, ".".join(parts), known, is_alternative)


def _alternatives(kind: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows."""
    if get_origin(kind) is Annotated:
        yield from _alternatives(get_args(kind)[0])
    elif get_origin(kind) in (Union, UnionType):
        for one in get_args(kind):
            yield from _alternatives(one)
    else:
        yield kind


def _members(kind: Any, part: int | str) -> Iterator[Any]:
    """Yield the types of a member of a value of this type; none if it has no such member."""
    arguments = get_args(kind)
    if get_origin(kind) in (tuple, list) and isinstance(part, int):
        yield from _alternatives(arguments[0])
    elif get_origin(kind) in (dict, Mapping) and isinstance(part, str):
        yield from _alternatives(arguments[1])
    elif part in (fields := _fields(kind)):
        yield from _alternatives(fields[part])


def _fields(kind: Any) -> dict[Any, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    return get_type_hints(kind, include_extras=True) if is_dataclass(kind) else {}


def _without_kinds_of_content(loc: Sequence[int | str]) -> Sequence[int | str]:
    """Leave out the alternatives of a message's content, whose names are also those of fields."""
    if loc[:1] == ("messages",) and loc[2:3] == ("content",):
        return [part for number, part in enumerate(loc) if number not in (3, 5)]
    return loc


def _no_such_field(name: str, known: Sequence[str]) -> str:
    near = get_close_matches(name, [one for one in known if one != name], 1)
    return f"no such field; did you mean {near[0]}?" if near else "no such field"


def _reasons(complaints: Sequence[_Complaint], others: Iterable[str]) -> str:
    """Return the validation errors with their locations, without quoting the input."""
    reasons = []
    # A list without its invalid items may be too short, but that is not the cause.
    locations = [one.item["loc"] for one in complaints]
    causes = {loc[:depth] for loc in locations for depth in range(len(loc))}
    for one in [
        one for one in complaints if one.item["type"] != "too_short" or one.item["loc"] not in causes
    ][:8]:
        item = one.item
        message = item["msg"].removeprefix("Value error, ")
        for python, json in _NAMES_OF_TYPES.items():
            message = message.replace(python, json)
        message = re.sub(r" or instance of \w+", "", message)
        if item["type"] in _UNKNOWN:
            known = [*one.known, *(others if len(item["loc"]) == 1 else ())]
            message = _no_such_field(str(item["loc"][-1]), known)
        elif item["type"] == "tuple_type":
            message = "should be a list"
        if item["loc"][:1] == ("messages",) and item["type"] in ("tuple_type", "model_type"):
            message = _CHAT_SHAPE
        reasons.append(f"{one.place}: {message}" if one.place else message)
    return "; ".join(reasons)
