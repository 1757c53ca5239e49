"""Error messages for a job's fields. They never quote its input."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from pydantic import ValidationError

from pagemill.bounds import InvalidParameter
from pagemill.producer.wire.schema.errors import InvalidJob

_CHAT_SHAPE = (
    'a chat is a list of messages like {"role": "user", "content": "..."}; '
    "a text by itself is a prompt=, or the content of one message"
)


def invalid_job(error: ValidationError, known: Iterable[str]) -> InvalidJob:
    """Return the error that tells every reason, with its place.

    Args:
        known: names of fields that a misspelt one may have meant.
    """
    return InvalidJob(_reasons(error, list(known)), _code(error), _param(error))


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
    return next((".".join(map(str, item["loc"])) for item in complaints if item["loc"]), None)


def _no_such_field(name: str, known: list[str]) -> str:
    near = get_close_matches(name, known, 1)
    return f"no such field; did you mean {near[0]}?" if near else "no such field"


def _reasons(error: ValidationError, known: list[str]) -> str:
    """Return the validation errors with their locations, without quoting the input."""
    reasons = []
    for item in error.errors(include_input=False, include_url=False, include_context=False)[:8]:
        place = ".".join(str(part) for part in item["loc"] if isinstance(part, int | str))
        message = item["msg"].removeprefix("Value error, ")
        if item["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
            message = _no_such_field(str(item["loc"][-1]), known)
        elif item["type"] == "tuple_type":
            message = "it should be a list"
        if item["loc"][:1] == ("messages",) and item["type"] in ("tuple_type", "model_type"):
            message = _CHAT_SHAPE
        reasons.append(f"{place}: {message}" if place else message)
    return "; ".join(reasons)
