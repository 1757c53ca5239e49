"""Error messages for a job's fields. They never quote its input."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches

from pydantic import ValidationError

from pagemill.common.bounds import InvalidParameter
from pagemill.producer.wire.schema.errors import InvalidJob

_CHAT_SHAPE = (
    'a chat is a list of messages like {"role": "user", "content": "..."}; '
    "a text by itself is a prompt=, or the content of one message"
)
_NAMES_OF_TYPES = {"Tuple": "List", "a dictionary": "an object", "dictionary": "object"}
"""Python's, and JSON's for them."""


def invalid_job(error: ValidationError, known: Iterable[str]) -> InvalidJob:
    """Return the error that lists every reason, with its place.

    Args:
        known: names of fields that a misspelt one may have meant.
    """
    fields = list(known)
    reasons = _reasons(error, fields)
    param = _param(error)
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


def _param(error: ValidationError) -> str | None:
    """Return the location of the first validation error that has one."""
    complaints = error.errors(include_input=False, include_url=False, include_context=False)
    return next((".".join(_place(item["loc"])) for item in complaints if item["loc"]), None)


def _place(loc: Sequence[int | str]) -> Iterator[str]:
    """Yield the parts of a location, without the names of the alternatives of a message's content."""
    is_content = False
    for number, part in enumerate(loc):
        if is_content and number in (3, 5):
            continue
        yield str(part)
        is_content |= loc[0] == "messages" and number == 2 and part == "content"


def _no_such_field(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"no such field; did you mean {near[0]}?" if near else "no such field"


def _reasons(error: ValidationError, known: list[str]) -> str:
    """Return the validation errors with their locations, without quoting the input."""
    reasons = []
    items = error.errors(include_input=False, include_url=False, include_context=False)
    # A list without its invalid items may be too short, which is not the cause.
    causes = {item["loc"][:depth] for item in items for depth in range(len(item["loc"]))}
    for item in [item for item in items if item["type"] != "too_short" or item["loc"] not in causes][:8]:
        place = ".".join(_place(item["loc"]))
        message = item["msg"].removeprefix("Value error, ")
        for python, json in _NAMES_OF_TYPES.items():
            message = message.replace(python, json)
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = _no_such_field(str(item["loc"][-1]), known)
        elif item["type"] == "tuple_type":
            message = "should be a list"
        if item["loc"][:1] == ("messages",) and item["type"] in ("tuple_type", "model_type"):
            message = _CHAT_SHAPE
        reasons.append(f"{place}: {message}" if place else message)
    return "; ".join(reasons)
