"""Making a job of a row: template, system message, model, sampling, shape of the output."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from pagemill.producer.dataset.rows import DatasetError, Row, RowError, shorten
from pagemill.producer.dataset.template import PromptTemplate, TemplateFailed
from pagemill.producer.wire.schema.chat import CHAT_FIELDS
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job

PROMPT_COLUMNS = ("messages", "prompt", "prompt_token_ids")
"""Columns for the prompt without a template; the first one present is used."""


@dataclass(frozen=True)
class Recipe:
    """The processing of every row. `fields` are further fields of a Job, applied to each.

    With a template, `chat` sends the text as a user's message through the model's chat template.
    """

    model: str
    template: str | None = None
    system: str | None = None
    chat: bool = True
    fields: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.is_scored:  # nothing is sampled
            fields = {name: value for name, value in self.fields.items() if name != "temperature"}
            object.__setattr__(self, "fields", fields)

    @property
    def is_scored(self) -> bool:
        """True if rows get log-probabilities instead of texts."""
        return self.fields.get("task") == "score"

    @cached_property
    def _template(self) -> PromptTemplate | None:
        return None if self.template is None else PromptTemplate(self.template)

    @cached_property
    def _system(self) -> PromptTemplate | None:
        return None if self.system is None else PromptTemplate(self.system)

    @cached_property
    def _is_repeatable(self) -> bool:
        """True if equal jobs, perhaps of a resumed run, have equal outputs."""
        return self.is_scored or self.fields.get("temperature") == 0 or self.fields.get("seed") is not None

    def check(self, first: Row | None) -> None:
        """Raise DatasetError for a recipe with which no row can succeed, before anything is submitted."""
        is_chat = not CHAT_FIELDS.isdisjoint(self.fields) and (self.chat or self.template is None)
        text: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        )
        probe = text | {"model": self.model, **self.fields}
        try:
            Job.parse(probe)
        except InvalidJob as error:
            raise DatasetError(f"these settings make no job: {error}") from None
        if self.system is not None and not self.chat:
            raise DatasetError("a system message needs the chat form: leave --no-chat out")
        columns = {} if first is None or first.fields is None else first.fields
        for template in (self._template, self._system):
            if template is not None and columns:
                template.check_columns(columns)
        if self._template is None and columns and not set(PROMPT_COLUMNS) & columns.keys():
            raise DatasetError(
                "say what the prompt is, for instance --template 'Summarize: {{ text }}'; "
                f"the columns are: {', '.join(columns)}"
            )

    def job(self, row: Row) -> Job | RowError:
        """Return the job of a row, or the error that prevents it."""
        if row.error is not None:
            return row.error
        assert row.fields is not None
        try:
            fields = {"dedupe": self._is_repeatable, "model": self.model, **self.fields}
            return Job.parse(fields | self._prompt(row.fields))
        except TemplateFailed as error:
            return RowError("template_error", str(error), raw_text(row.fields))
        except InvalidJob as error:
            return RowError(error.code, str(error), raw_text(row.fields))

    def _prompt(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        if self._template is None:
            for name in PROMPT_COLUMNS:
                if columns.get(name) is not None:
                    return self._given(name, columns[name], columns)
            raise TemplateFailed(f"the row has none of {', '.join(PROMPT_COLUMNS)}")
        text = self._template.render(columns)
        return self._as_chat(text, columns) if self.chat else {"prompt": text}

    def _given(self, name: str, value: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        if name == "prompt" and self.chat and isinstance(value, str):
            return self._as_chat(value, columns)
        if name == "messages" and isinstance(value, str):
            try:
                value = json.loads(value)  # a CSV cell
            except json.JSONDecodeError as error:
                raise TemplateFailed(f"the messages column is no JSON: {error.msg}") from None
        if name == "messages" and self._system is not None and isinstance(value, list):
            value = [{"role": "system", "content": self._system.render(columns)}, *value]
        return {name: value}

    def _as_chat(self, text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        messages = [{"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(columns)})
        return {"messages": messages}


def raw_text(fields: Mapping[str, Any]) -> str:
    """Return a row as shown in the errors file."""
    return shorten(json.dumps(fields, ensure_ascii=False))
