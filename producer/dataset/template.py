"""Prompt templates: Jinja2 in its sandbox, rendered with a row's columns.

A template comes from the user who starts the run, never from a row or the queue.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from jinja2 import StrictUndefined, TemplateError, TemplateSyntaxError, UndefinedError, meta
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from pagemill.producer.dataset.rows import DatasetError

ROW_NAME = "row"
"""The whole row, for columns whose names are not identifiers: {{ row["review text"] }}."""
MAX_RENDERED_CHARACTERS = 1 << 20


class TemplateFailed(ValueError):
    """This row cannot be rendered; the run goes on."""


class PromptTemplate:
    """A text with {{ column }} in it. Raises DatasetError if it is not a template."""

    def __init__(self, source: str) -> None:
        self.source = source
        environment = ImmutableSandboxedEnvironment(
            undefined=StrictUndefined, keep_trailing_newline=True, autoescape=False
        )
        environment.policies["json.dumps_kwargs"] = {"ensure_ascii": False, "sort_keys": False}
        environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
        environment.globals.pop("range", None)  # a typo must not loop for an hour
        try:
            self._template = environment.from_string(source)
            self.names = frozenset(meta.find_undeclared_variables(environment.parse(source)))
        except TemplateSyntaxError as error:
            raise DatasetError(f"the template's line {error.lineno}: {error.message}") from None

    def check_columns(self, columns: Mapping[str, Any]) -> None:
        """Raise DatasetError if the row lacks a column of the template, naming the existing ones."""
        unknown = sorted(self.names - columns.keys() - {ROW_NAME})
        if unknown:
            raise DatasetError(
                f"the template asks for {', '.join(unknown)}; the columns are: {', '.join(columns) or 'none'}"
            )

    def render(self, fields: Mapping[str, Any]) -> str:
        """Return the text for one row. Raises TemplateFailed."""
        try:
            pieces, size = [], 0
            for piece in self._template.generate({ROW_NAME: fields, **fields}):
                size += len(piece)
                if size > MAX_RENDERED_CHARACTERS:
                    raise TemplateFailed(f"the prompt has more than {MAX_RENDERED_CHARACTERS} characters")
                pieces.append(piece)
        except UndefinedError as error:
            raise TemplateFailed(f"the row lacks what the template asks for: {error.message}") from None
        except SecurityError as error:
            raise TemplateFailed(f"the template may not do that: {error.message}") from None
        except TemplateFailed:
            raise
        except (TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise TemplateFailed(f"{type(error).__name__}: {error}") from None
        return "".join(pieces)
