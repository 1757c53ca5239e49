"""Validation of options by pydantic types, so that bad values are rejected before a worker or job does."""

from __future__ import annotations

import codecs
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import urlsplit

import typer
from pydantic import AfterValidator, Field, StringConstraints, TypeAdapter, ValidationError

from pagemill.engine.errors import ModelLoadError, complaint
from pagemill.engine.models.source import ModelSource
from pagemill.producer.wire.schema.keys import ModelName

YEAR_S = 366 * 86_400.0
MAX_TEMPERATURE = 1e6

Priority = Literal["high", "normal", "low"]
LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["console", "json"]
Transport = Annotated[str, StringConstraints(pattern=r"^[A-Za-z][A-Za-z0-9+._-]*://\S*$", max_length=4096)]
CeleryQueue = Annotated[str, StringConstraints(pattern=r"^\S+$", max_length=255)]
AppName = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_.]*(:[A-Za-z_][A-Za-z0-9_]*)?$")]
Cursor = Annotated[str, StringConstraints(pattern=r"^[es][0-9]{1,15}$")]
"""`BatchItem.cursor`."""
Text = Annotated[str, StringConstraints(min_length=1, max_length=255, pattern=r"^[^\x00-\x1f\x7f]+$")]


def _check_model(model: str) -> str:
    _model_name.validate_python(served_name(model))
    return model


def _check_encoding(name: str) -> str:
    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        raise ValueError("should be an encoding that Python knows, such as utf-8") from None
    return name


def _check_delimiter(text: str) -> str:
    text = "\t" if text in (r"\t", "tab") else text
    if len(text) != 1 or text in '"\r\n\ufeff ' or text.isalnum():
        raise ValueError(
            r"should be one character, such as ';' or '\t', and no letter, digit, quote or space"
        )
    return text


def _check_http_url(url: str) -> str:
    try:
        parts = urlsplit(url)
        is_good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        is_good = False
    if not is_good:
        raise ValueError("should be an address such as http://127.0.0.1:9790")
    return url


def _check_output(path: Path) -> Path:
    if not path.name:  # `.` and `/` have no name from which to derive other files
        raise typer.BadParameter("should name a file or folder")
    return path


_model_name: TypeAdapter[str] = TypeAdapter(ModelName)
ModelOrPath = Annotated[str, AfterValidator(_check_model)]
Encoding = Annotated[str, AfterValidator(_check_encoding)]
Delimiter = Annotated[str, AfterValidator(_check_delimiter)]
HttpUrl = Annotated[str, AfterValidator(_check_http_url)]
OutputPath = Annotated[Path, AfterValidator(_check_output)]


def checked(kind: Any) -> Callable[[Any], Any]:
    """Return an option callback that validates the value, or each of several, by a pydantic type."""

    @cache
    def adapter() -> TypeAdapter[Any]:
        return TypeAdapter(kind)

    def check_value(value: Any) -> Any:
        if value is None:
            return None
        if isinstance(value, list | tuple):
            return [check_value(item) for item in value]
        try:
            return adapter().validate_python(value)
        except ValidationError as error:
            raise typer.BadParameter(complaint(error)) from None

    return check_value


def between(low: float, high: float) -> Any:
    """Return a number's range, which excludes NaN, for an annotation."""
    return Field(ge=low, le=high)


def served_name(model: str) -> str:
    """Return the name under which a worker serves a model: that of the repository, folder or file."""
    try:
        return ModelSource.parse(model).served_name
    except ModelLoadError:  # a name configured for a worker
        return model
