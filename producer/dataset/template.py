"""Prompt templates: Jinja2 in its sandbox, rendered with a row's columns.

A template comes from the user who starts the run, never from a row or the queue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import wraps
from typing import Any

from jinja2 import (
    Environment,
    StrictUndefined,
    TemplateError,
    TemplateSyntaxError,
    Undefined,
    UndefinedError,
    meta,
    nodes,
    pass_environment,
    pass_eval_context,
)
from jinja2.exceptions import SecurityError
from jinja2.filters import FILTERS, make_attrgetter
from jinja2.nodes import EvalContext
from jinja2.runtime import LoopContext, TemplateReference
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.output_places import placed

ROW_NAME = "row"
"""The complete row, for columns whose names are not identifiers: {{ row["review text"] }}."""
MAX_RENDERED_CHARACTERS = 1 << 20


_TEXT_FILTERS = (
    "capitalize", "center", "e", "escape", "forceescape", "indent", "lower", "replace", "string", "pprint", "striptags",
    "title", "trim", "truncate", "upper", "urlencode", "urlize", "wordcount", "wordwrap",
)  # fmt: skip
"""Jinja2's filters that would convert null to the text "None"."""


class TemplateFailed(ValueError):
    """This row cannot be rendered; the run continues."""


class NullRendered(TemplateFailed):
    """The template prints a null of this row."""


class PromptTemplate:
    """A text with {{ column }} in it. Raises DatasetError if it is not a template.

    A printed null is an empty text with `nulls_are_empty`, otherwise an error of the row; conditions, `default` and
    `tojson` receive it unchanged.
    """

    def __init__(
        self, source: str, *, nulls_are_empty: bool = False, places: Mapping[str, object] | None = None
    ) -> None:
        """`places`: names that are not columns, and the values that `render` prints for them."""
        self.source = source
        self._places = places or {}
        environment = _environment(nulls_are_empty)
        try:
            self._template = environment.from_string(source)
            tree = environment.parse(source)
            self.names = frozenset(meta.find_undeclared_variables(tree)) - self._places.keys()
            self._optional = _optional_names(tree)
            self._keys = _row_keys(tree)
            self.placed = placed(tree, self._places.keys())
            self._has_plain_row = _has_plain_row(tree)
        except TemplateSyntaxError as error:
            raise DatasetError(f"the template's line {error.lineno}: {error.message}") from None

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise DatasetError if the row lacks a column of the template, naming the existing ones."""
        if shared := sorted(self._places.keys() & columns.keys()):
            raise DatasetError(f"{shared[0]} is a column and a step; give the step another name")
        _check_columns("the template", self.names - self._optional, columns, self._has_plain_row)

    def is_empty(self, fields: Mapping[str, Any]) -> bool:
        """Return whether every column that the template names is null or blank in this row."""
        names: Set[str] = (self.names - {ROW_NAME}) | self._keys
        if self._has_plain_row and ROW_NAME in self.names:
            names = fields.keys()
        return bool(names) and all(name in fields and is_blank(fields[name]) for name in names)

    def render(self, fields: Mapping[str, Any], places: Mapping[str, object] | None = None) -> str:
        """Return the text for one row, optionally with other values for the places. Raises TemplateFailed."""
        try:
            pieces, size = [], 0
            named = self._places if places is None else places
            for piece in self._template.generate({**fields, ROW_NAME: fields, **named}):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise TemplateFailed(f"the prompt has more than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except NullRendered:
            nulls = [name for name in sorted(self.names) if fields.get(name, "") is None]
            raise NullRendered(
                f"the template prints a null ({', '.join(nulls) or 'inside a column'})"
            ) from None
        except UndefinedError as error:
            raise TemplateFailed(f"the row lacks what the template asks for: {error.message}") from None
        except _ROW_ERRORS as error:
            raise _failed(error) from None
        return "".join(pieces)


class Condition:
    """An expression about a row, in Jinja2's syntax and sandbox: `stars >= 3 and lang in ("de", "fr")`.

    Raises DatasetError if it is invalid.
    """

    def __init__(self, source: str) -> None:
        environment = _environment(True)
        try:
            self._expression = environment.compile_expression(source, undefined_to_none=False)
            tree = environment.parse("{{ (" + source + ") }}")
            self._names = meta.find_undeclared_variables(tree) - _optional_names(tree)
            self._has_plain_row = _has_plain_row(tree)
        except TemplateSyntaxError as error:
            raise DatasetError(f"--where {source!r} is not an expression: {error.message}") from None

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise DatasetError if the row lacks a column of the expression."""
        _check_columns("--where", self._names, columns, self._has_plain_row)

    def holds(self, fields: Mapping[str, Any]) -> bool:
        """Return whether the row is selected. Raises TemplateFailed."""
        try:
            return bool(self._expression({**fields, ROW_NAME: fields}))
        except UndefinedError as error:
            raise TemplateFailed(f"the row lacks what --where asks for: {error.message}") from None
        except _ROW_ERRORS as error:
            raise _failed(error) from None


def is_blank(value: Any) -> bool:
    """Return whether a cell is blank: null, white space, or an empty list or object."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


_ROW_ERRORS = (
    SecurityError, TemplateFailed, TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError,
)  # fmt: skip


def _failed(error: Exception) -> TemplateFailed:
    match error:
        case TemplateFailed():
            return error
        case SecurityError():
            return TemplateFailed(f"not allowed in a template: {error.message}")
    return TemplateFailed(f"{type(error).__name__}: {error}")


def _has_plain_row(tree: nodes.Template) -> bool:
    """Return whether `row` occurs alone, as the row or a column of that name; `row["x"]` is the row's."""
    within = {id(node.node) for node in tree.find_all(nodes.Getattr)}
    within |= {id(node.node) for node in tree.find_all(nodes.Getitem)}
    names = (node for node in tree.find_all(nodes.Name) if node.name == ROW_NAME and node.ctx == "load")
    return any(id(node) not in within for node in names)


def _optional_names(tree: nodes.Template) -> frozenset[str]:
    """Return the names for which the template provides a default, or whose existence it tests."""
    guards = [node.node for node in tree.find_all(nodes.Filter) if node.name in ("default", "d")]
    guards += [node.node for node in tree.find_all(nodes.Test) if node.name in ("defined", "undefined")]
    return frozenset(node.name for node in guards if isinstance(node, nodes.Name))


def _row_keys(tree: nodes.Template) -> frozenset[str]:
    """Return the columns that are written as `row["x"]` or `row.x`."""
    keys = {
        node.arg.value
        for node in tree.find_all(nodes.Getitem)
        if _is_row(node.node) and isinstance(node.arg, nodes.Const) and isinstance(node.arg.value, str)
    }
    return frozenset(keys | {node.attr for node in tree.find_all(nodes.Getattr) if _is_row(node.node)})


def _is_row(node: nodes.Node) -> bool:
    return isinstance(node, nodes.Name) and node.name == ROW_NAME


def _check_columns(asking: str, names: Set[str], columns: Mapping[str, Any], has_plain_row: bool) -> None:
    if ROW_NAME in columns and ROW_NAME in names and has_plain_row:
        raise DatasetError(
            f"{asking} asks for {ROW_NAME}, which is a column and the name of the whole row: "
            f'write {ROW_NAME}["{ROW_NAME}"] for the column, or rename it'
        )
    unknown = sorted(names - columns.keys() - {ROW_NAME})
    if unknown:
        raise DatasetError(
            f"{asking} asks for {', '.join(unknown)}; the columns are: {', '.join(columns) or 'none'}"
        )


class _Missing(StrictUndefined):
    """Undefined values also raise inside a list or an object that is printed."""

    __slots__ = ()
    __repr__ = StrictUndefined.__str__


class _Environment(ImmutableSandboxedEnvironment):
    """Interprets `order.items` as a field of the row, even if Python has an attribute of that name.

    `order.items()` calls the method, and without a field of that name `order.items` is undefined.
    """

    def _generate(self, source: nodes.Template, *args: Any, **options: Any) -> str:
        called = {id(call.node) for call in source.find_all(nodes.Call)}
        return super()._generate(_without_nulls(_by_key(source, called)), *args, **options)

    def getitem(self, obj: Any, argument: Any) -> Any:
        value = super().getitem(obj, argument)
        if callable(value) and not isinstance(value, Undefined) and isinstance(obj, _ROW_TYPES):
            return self.undefined(obj=obj, name=argument)
        return value


_ROW_TYPES = (Mapping, Sequence, int, float)
"""The types of a row's values. They are not callable, so callable values are methods."""


def _by_key(node: nodes.Node, called: Set[int]) -> Any:
    """Return the tree with `a.b` as `a["b"]`, which looks for keys first, except where a method is called."""
    for name, value in node.iter_fields():
        if isinstance(value, nodes.Node):
            setattr(node, name, _by_key(value, called))
        elif isinstance(value, list):
            value[:] = [_by_key(one, called) if isinstance(one, nodes.Node) else one for one in value]
    if isinstance(node, nodes.Getattr) and node.ctx == "load" and id(node) not in called:
        key = nodes.Const(node.attr, lineno=node.lineno, environment=node.environment)
        return nodes.Getitem(node.node, key, node.ctx, lineno=node.lineno, environment=node.environment)
    return node


def _without_nulls(tree: Any) -> Any:
    """Treat the parts of `a ~ b` and the values of `"%s" % a` as printed ones."""

    def printed(node: nodes.Expr) -> nodes.Expr:
        function = nodes.EnvironmentAttribute("finalize", lineno=node.lineno, environment=node.environment)
        return nodes.Call(function, [node], [], None, None, lineno=node.lineno, environment=node.environment)

    for concat in list(tree.find_all(nodes.Concat)):
        concat.nodes = [printed(part) for part in concat.nodes]
    for node in list(tree.find_all(nodes.Mod)):
        if isinstance(node.left, nodes.Const) and isinstance(node.left.value, str):
            if isinstance(node.right, nodes.Tuple):
                node.right.items = [printed(item) for item in node.right.items]
            else:
                node.right = printed(node.right)
    return tree


def _environment(nulls_are_empty: bool) -> ImmutableSandboxedEnvironment:
    environment = _Environment(
        undefined=_Missing,
        keep_trailing_newline=True,
        autoescape=False,
        finalize=_blank_null if nulls_are_empty else _refuse_null,
    )
    environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    environment.filters |= {name: _keeping_null(environment.filters[name]) for name in _TEXT_FILTERS}
    environment.filters |= {"join": _join, "format": _format}
    environment.globals.pop("range", None)  # a typo must not cause an hour-long loop
    return environment


@pass_eval_context
def _join(context: EvalContext, values: Any, *separator: Any, **options: Any) -> Any:
    """Jinja2's filter, with the elements as they are printed."""
    environment = context.environment
    attribute = options.pop("attribute", separator[1] if len(separator) > 1 else None)
    read: Any = (lambda value: value) if attribute is None else make_attrgetter(environment, attribute)
    assert environment.finalize is not None
    printed = [environment.finalize(read(value)) for value in values]
    return FILTERS["join"](context, printed, *separator[:1], **options)


@pass_environment
def _format(environment: Environment, value: Any, *values: Any, **named: Any) -> Any:
    """Jinja2's filter, with the values as they are printed."""
    finalize = environment.finalize
    assert finalize is not None
    printed = {name: finalize(each) for name, each in named.items()}
    return FILTERS["format"](value, *map(finalize, values), **printed)


def _keeping_null(text_filter: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter, with null as the result for null."""
    place = 1 if hasattr(text_filter, "jinja_pass_arg") else 0

    @wraps(text_filter)
    def filtered(*values: Any, **options: Any) -> Any:
        return None if values[place] is None else text_filter(*values, **options)

    return filtered


def _blank_null(value: Any) -> Any:
    return "" if value is None else _printable(value)


def _refuse_null(value: Any) -> Any:
    if value is None:
        raise NullRendered
    return _printable(value)


def _printable(value: Any) -> Any:
    """Return a value to print. Raises TemplateFailed for values that print as `<... object at 0x...>`."""
    if isinstance(value, Undefined):  # it raises its own error
        return value
    if isinstance(value, Iterator):
        raise TemplateFailed("the template prints a generator: add `| list` or `| join`")
    if callable(value) or isinstance(value, TemplateReference | LoopContext | Namespace):
        raise TemplateFailed(f"the template prints a {type(value).__name__}; only values can be printed")
    return value
