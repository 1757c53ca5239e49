"""Options of commands, declared as the fields of classes.

A command takes instances of subclasses of `Options`. A field `window: Annotated[int, between(1, 10**6)] = 1000` of one
is the option `--window`. Its annotation gives the type and what is valid, the docstring under it the help text. Only
what differs is stated, by a `typer.Option` or `typer.Argument` in the annotation: another flag, a metavar, a variable.
A field can also be a class of options.

A parameter `Annotated[dict[str, Any], OPTIONS]` stands for the options of a mapping from names to annotations, as
`setting_flags.options` makes them; the command receives those that are set.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from dataclasses import fields
from functools import cache, wraps
from inspect import Parameter
from itertools import pairwise
from types import GenericAlias, NoneType, UnionType
from typing import Annotated, Any, Union, dataclass_transform, get_args, get_origin, get_type_hints

import typer
from typer.models import OptionInfo, ParameterInfo

from pagemill.cli.terminal.checked import checked

_CLASS = re.compile(r"^class (\w+).*\n(?:(?!    (?:@|def ))[ )].*\n|\n)*", re.MULTILINE)


@dataclass_transform(frozen_default=True, kw_only_default=True)
class Options:
    """Some options of a command. Subclasses are typed as frozen dataclasses; real ones would lengthen the startup."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def fields_of(self, kind: Any) -> dict[str, Any]:
        """Return the options that are also fields of a dataclass."""
        names = [field.name for field in fields(kind)]
        return {name: value for name, value in vars(self).items() if name in names}


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Return a function for typer with a parameter per option."""
    taken = {
        name: each.annotation for name, each in inspect.signature(command, eval_str=True).parameters.items()
    }

    @wraps(command)
    def flat(**values: Any) -> None:
        command(**{name: _gather(name, kind, values) for name, kind in taken.items()})

    flags = [flag for name, kind in taken.items() for flag in _parameters(name, kind)]
    flat.__signature__ = inspect.Signature(flags)  # type: ignore[attr-defined]
    flat.__annotations__ = {flag.name: flag.annotation for flag in flags}
    return flat


def _parameters(name: str, kind: Any, default: Any = Parameter.empty, doc: str = "") -> Sequence[Parameter]:
    if _is_group(kind):
        return _parameters_of(kind)
    if (options := _mapping(kind)) is not None:
        return [_parameter(each, annotation, None) for each, annotation in options.items()]
    return [_parameter(name, kind if kind is typer.Context else _option(name, kind, doc), default)]


def _parameter(name: str, annotation: Any, default: Any) -> Parameter:
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


@cache
def _parameters_of(kind: Any) -> Sequence[Parameter]:
    docs = {name: doc for base in reversed(kind.__mro__[:-2]) for name, doc in docstrings(base).items()}
    return [
        flag
        for name, hint in _hints(kind).items()
        for flag in _parameters(name, hint, getattr(kind, name, Parameter.empty), docs.get(name, ""))
    ]


@cache
def _hints(kind: Any) -> Mapping[str, Any]:
    return get_type_hints(kind, include_extras=True)


def _gather(name: str, kind: Any, values: Mapping[str, Any]) -> Any:
    if _is_group(kind):
        return kind(**{each: _gather(each, hint, values) for each, hint in _hints(kind).items()})
    if (options := _mapping(kind)) is not None:
        return {each: value for each in options if (value := values[each]) not in (None, [])}
    return values[name]


def _is_group(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, Options)


def _mapping(kind: Any) -> Mapping[str, Any] | None:
    return next((each for each in getattr(kind, "__metadata__", ()) if isinstance(each, Mapping)), None)


def _option(name: str, annotation: Any, doc: str) -> Any:
    """Return the annotation of a command's parameter for a field."""
    kind, extras = _split(annotation)
    stated = [each for each in extras if isinstance(each, ParameterInfo)]
    rules = tuple(each for each in extras if not isinstance(each, ParameterInfo))
    info: Any = copy(stated[0]) if stated else typer.Option()
    if isinstance(info, OptionInfo) and info.default is ...:
        info.default = f"--{name.replace('_', '-')}"  # the place of a first flag in an annotation
    info.help = info.help or doc
    is_list = get_origin(kind) is list
    item = get_args(kind)[0] if is_list else Annotated[kind, *rules] if rules else kind
    found = leaves(item)
    plain: Any = next((each for each in found if len(found) == 1 and isinstance(each, type)), str)
    if plain is int:  # typer shows its range in the help text
        for low, high in (each.metadata for each in rules):
            info.min, info.max = low.ge, high.le
    elif item is not plain and info.callback is None:
        info.callback = checked(item)
    return Annotated[GenericAlias(list, plain) if is_list else plain, info]


def _split(annotation: Any) -> tuple[Any, tuple[Any, ...]]:
    """Return a type without None, and its metadata."""
    if get_origin(annotation) is Annotated:
        kind, extras = _split(annotation.__origin__)
        return kind, (*extras, *annotation.__metadata__)
    if get_origin(annotation) in (Union, UnionType):
        kinds = [each for each in get_args(annotation) if each is not NoneType]
        if len(kinds) == 1:
            return _split(kinds[0])
    return annotation, ()


def leaves(kind: Any) -> set[Any]:
    """Return the members of a union, without None and metadata."""
    origin = get_origin(kind)
    if origin in (Union, UnionType):
        return set[Any]().union(*map(leaves, get_args(kind))) - {NoneType}
    if origin is Annotated:
        return leaves(get_args(kind)[0])
    return {kind}


@cache
def docstrings(kind: type) -> Mapping[str, str]:
    """Return the docstrings under the fields of a class; empty if its source is not installed."""
    if (source := _classes(kind.__module__).get(kind.__name__)) is None:
        return {}
    (definition,) = ast.parse(f"{source}    pass").body
    assert isinstance(definition, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(definition.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
        if isinstance(text.value.value, str)
    }


@cache
def _classes(module: str) -> Mapping[str, str]:
    """Return the source of each class of a module up to its first method; to parse all would take longer."""
    try:
        source = inspect.getsource(sys.modules[module])
    except OSError:
        return {}
    return {found[1]: found[0] for found in _CLASS.finditer(source)}
