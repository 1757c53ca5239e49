"""Commands with many options, which take them in groups.

A parameter that is a dataclass represents an option per field. A parameter `Annotated[dict[str, Any], OPTIONS]` stands
for the options of a mapping from names to annotations, as `setting_flags.options` makes them; the command receives
those that are set.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, get_type_hints


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer with a parameter per option; those of dataclasses come last."""
    flags = signature(command, eval_str=True).parameters

    @wraps(command)
    def flat(**values: Any) -> None:
        command(**{name: _gather(name, each.annotation, values) for name, each in flags.items()})

    taken = [
        parameter
        for name, each in sorted(flags.items(), key=lambda item: is_dataclass(item[1].annotation))
        for parameter in _parameters(name, each.annotation, each.default)
    ]
    flat.__signature__ = Signature(taken)  # type: ignore[attr-defined]
    flat.__annotations__ = {parameter.name: parameter.annotation for parameter in taken}
    return flat


def _parameters(name: str, kind: Any, default: Any) -> list[Parameter]:
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        return [
            parameter
            for field in fields(kind)
            for parameter in _parameters(field.name, hints[field.name], field.default)
        ]
    if (options := _options(kind)) is not None:
        return [parameter for each, hint in options.items() for parameter in _parameters(each, hint, None)]
    default = Parameter.empty if default is MISSING else default
    return [Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=kind)]


def _gather(name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    if is_dataclass(kind):
        hints = get_type_hints(kind, include_extras=True)
        make: Any = kind
        return make(**{field.name: _gather(field.name, hints[field.name], values) for field in fields(kind)})
    if (options := _options(kind)) is not None:
        return {each: value for each in options if (value := values[each]) not in (None, [])}
    return values[name]


def _options(kind: Any) -> Mapping[str, Any] | None:
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Mapping)), None)
