"""Commands with many options: a dataclass declares them, and the command takes it as one argument."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[[Any], None]) -> Callable[..., None]:
    """Return a function for typer with one parameter per field of the dataclass that `command` takes."""
    (parameter,) = signature(command).parameters
    options = get_type_hints(command)[parameter]
    hints = get_type_hints(options, include_extras=True)

    @wraps(command)
    def flat(**values: Any) -> None:
        command(options(**values))

    flat.__signature__ = Signature(  # type: ignore[attr-defined]
        [
            Parameter(
                field.name,
                Parameter.KEYWORD_ONLY,
                default=Parameter.empty if field.default is MISSING else field.default,
                annotation=hints[field.name],
            )
            for field in fields(options)
        ]
    )
    flat.__annotations__ = hints
    return flat
