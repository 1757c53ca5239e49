"""Making a job of a row: template, system message, model, sampling, shape of the output."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Literal, TypeAlias

from pagemill.bounds import InvalidParameter
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.tables.rows import Row, RowError, shorten
from pagemill.producer.dataset.template import NullRendered, PromptTemplate, TemplateFailed, is_blank
from pagemill.producer.wire.schema.chat import CHAT_FIELDS
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.tasks import POOLED_TASKS
from pagemill.structured_outputs import StructuredOutputs, is_model

OnRow: TypeAlias = Literal["fail", "skip", "label"]
"""What becomes of a row: an error, left out, or a job like others."""
PROMPT_COLUMNS = ("messages", "prompt", "prompt_token_ids")
"""Columns for the prompt without a template; the first one present is used."""
NO_SETTINGS = frozenset(
    {"priority", "tenant", "deadline", "ttl", "delay", "run_at", "timeout", "max_attempts", "metadata"}
)
"""Fields of a job that change when it runs, and nothing in its output."""


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
    on_null: OnRow = "fail"
    """A row of which the template prints a null; `label` prints nothing."""
    on_empty: OnRow = "fail"
    """A row whose columns that the template names, or whose prompt, are all null or blank."""

    def __post_init__(self) -> None:
        if self.is_pooled:
            object.__setattr__(self, "chat", False)
        fields = dict(self.fields)
        if self.is_scored or self.is_pooled:  # nothing is sampled
            fields.pop("temperature", None)
        if is_model(fields.get("response_format")):
            fields["structured_outputs"] = fields.pop("response_format")
        if (shape := fields.get("structured_outputs")) is not None:
            with contextlib.suppress(InvalidParameter):  # `check` tells
                given = asdict(StructuredOutputs.of(shape))
                fields["structured_outputs"] = {
                    name: value for name, value in given.items() if value is not None
                }
        object.__setattr__(self, "fields", fields)

    @property
    def is_scored(self) -> bool:
        """True if rows get log-probabilities instead of texts."""
        return self.fields.get("task") == "score"

    @property
    def has_label_probs(self) -> bool:
        """True if rows get the probability of every label of the choice."""
        return self.fields.get("label_probs") is not None

    @property
    def task(self) -> str:
        return str(self.fields.get("task", "generate"))

    @property
    def is_pooled(self) -> bool:
        """True if rows get vectors, labels or scores instead of texts."""
        return self.task in POOLED_TASKS

    @property
    def gives_vectors(self) -> bool:
        """True if every output is a list of numbers."""
        return self.task in ("embed", "rerank") and "inputs" not in self.fields

    @property
    def has_shape(self) -> bool:
        """True if the output has to be of a form, and not any text."""
        return any(self.fields.get(name) is not None for name in ("structured_outputs", "response_format"))

    @property
    def wants_json(self) -> bool:
        """True if the output is the JSON of a schema."""
        shape = self.fields.get("structured_outputs") or {}
        return "json" in shape or self.fields.get("response_format") is not None

    def settings(self) -> dict[str, Any]:
        """Return everything that an output depends on but its row."""
        about = {"model": self.model, "template": self.template, "system": self.system, "chat": self.chat}
        return about | {name: value for name, value in self.fields.items() if name not in NO_SETTINGS}

    @cached_property
    def _template(self) -> PromptTemplate | None:
        return self._made(self.template)

    @cached_property
    def _system(self) -> PromptTemplate | None:
        return self._made(self.system)

    def _made(self, source: str | None) -> PromptTemplate | None:
        return None if source is None else PromptTemplate(source, nulls_are_empty=self.on_null == "label")

    @cached_property
    def _is_repeatable(self) -> bool:
        """True if equal jobs, perhaps of a resumed run, have equal outputs."""
        is_certain = self.is_scored or self.is_pooled or self.has_label_probs
        return is_certain or self.fields.get("temperature") == 0 or self.fields.get("seed") is not None

    def check(self, first: Row | None) -> None:
        """Raise DatasetError for a recipe with which no row can succeed, before anything is submitted."""
        is_chat = not CHAT_FIELDS.isdisjoint(self.fields) and (self.chat or self.template is None)
        text: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        )
        probe = text | {"model": self.model, **self.fields}
        if self.task == "rerank":
            probe.setdefault("documents", ["x"])
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
        if self.on_empty != "label" and self._is_empty(row.fields):
            reason = "there is nothing to work on: what the prompt is made of is null or blank"
            return RowError("empty_row", reason, raw_text(row.fields), self.on_empty == "skip")
        try:
            fields = {"dedupe": self._is_repeatable, "model": self.model, **self.fields}
            if self.task == "rerank" and "documents" not in fields:
                fields["documents"] = row.fields.get("documents")
            return Job.parse(fields | self._prompt(row.fields))
        except NullRendered as error:
            return RowError("null_in_prompt", str(error), raw_text(row.fields), self.on_null == "skip")
        except TemplateFailed as error:
            return RowError("template_error", str(error), raw_text(row.fields))
        except InvalidJob as error:
            return RowError(error.code, str(error), raw_text(row.fields))

    def _is_empty(self, columns: Mapping[str, Any]) -> bool:
        if self._template is not None:
            return self._template.is_empty(columns)
        given = [columns[name] for name in PROMPT_COLUMNS if name in columns]
        return bool(given) and all(map(is_blank, given))

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
