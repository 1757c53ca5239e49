"""Creation of a row's job: template, system message, model, sampling, shape of the output."""

from __future__ import annotations

import contextlib
import json
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias

from pagemill.common.bounds import InvalidParameter
from pagemill.common.structured_outputs import StructuredOutputs, is_model
from pagemill.producer.client.images import parse_job
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure
from pagemill.producer.dataset.tables.rows import Row, RowError, shorten
from pagemill.producer.dataset.template import NullRendered, PromptTemplate, TemplateFailed, is_blank
from pagemill.producer.wire.schema.errors import InvalidJob
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.tasks import POOLED_TASKS
from pagemill.producer.wire.schema.text.chat import CHAT_FIELDS

OnRow: TypeAlias = Literal["fail", "skip", "label"]
"""The treatment of a row: an error, left out, or an ordinary job."""
OnTruncated: TypeAlias = Literal["fail", "label"]
"""The treatment of an output that ended at max_tokens: an error, or an ordinary output."""
NO_MODEL: Final = "-"
"""The model until the run knows the served one."""
PROMPT_COLUMNS = ("messages", "prompt", "prompt_token_ids")
"""Columns for the prompt without a template; the first one present is used."""
NO_SETTINGS = frozenset(
    {"priority", "tenant", "deadline", "ttl", "delay", "run_at", "timeout", "max_attempts", "metadata"}
)
"""Fields of a job that affect when it runs, but not its output."""


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
    """The treatment of a row with a null that the template prints; `label` prints an empty text."""
    on_empty: OnRow = "fail"
    """The treatment of a row whose columns in the template, or whose prompt, are all null or blank."""
    places: Mapping[str, object] = field(default_factory=dict)
    """Names in the templates that are not columns, and the values to print for them."""
    image_column: str | None = None
    """The column with the images, which the model sees before the prompt."""
    examples: tuple[Mapping[str, Any], ...] = ()
    """Rows with an `output`, given to the model as earlier turns of the chat."""

    def __post_init__(self) -> None:
        if self.is_pooled:
            object.__setattr__(self, "chat", False)
        fields = dict(self.fields)
        if self.is_scored or self.is_pooled:  # these tasks do not sample
            fields.pop("temperature", None)
        if is_model(fields.get("response_format")):
            fields["structured_outputs"] = fields.pop("response_format")
        if (shape := fields.get("structured_outputs")) is not None:
            with contextlib.suppress(InvalidParameter):  # `check` reports it
                given = asdict(StructuredOutputs.from_shape(shape))
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
        """True if the output must have a certain form instead of arbitrary text."""
        return any(self.fields.get(name) is not None for name in ("structured_outputs", "response_format"))

    @property
    def wants_json(self) -> bool:
        """True if the output is JSON of a schema."""
        shape = self.fields.get("structured_outputs") or {}
        return "json" in shape or self.fields.get("response_format") is not None

    def settings(self) -> dict[str, Any]:
        """Return everything that an output depends on except its row."""
        about: dict[str, Any] = {
            "model": self.model, "template": self.template, "system": self.system, "chat": self.chat
        }  # fmt: skip
        if self.examples:
            about["examples"] = self.examples
        if self.image_column is not None:
            about["image_column"] = self.image_column
        return about | {name: value for name, value in self.fields.items() if name not in NO_SETTINGS}

    @property
    def placed(self) -> frozenset[tuple[str, str]]:
        """Return the placeholders that the templates name, with their fields."""
        made = (self._template, self._system)
        return frozenset().union(*(template.placed for template in made if template is not None))

    @cached_property
    def _template(self) -> PromptTemplate | None:
        return self._made(self.template)

    @cached_property
    def _system(self) -> PromptTemplate | None:
        return self._made(self.system)

    def _made(self, source: str | None) -> PromptTemplate | None:
        if source is None:
            return None
        return PromptTemplate(source, nulls_are_empty=self.on_null == "label", places=self.places)

    @cached_property
    def _turns(self) -> list[dict[str, Any]]:
        """Return the examples as turns of a chat. Raises DatasetError."""
        turns = []
        for number, example in enumerate(self.examples, 1):
            if "output" not in example:
                raise DatasetError(f"example {number} has no output")
            if self._template is None or not self.chat:
                raise DatasetError("examples need a template, and the chat form")
            given = {name: value for name, value in example.items() if name != "output"}
            output = example["output"]
            try:
                text = self._template.render(given, {})
            except TemplateFailed as error:
                raise DatasetError(f"example {number}: {error}") from None
            answer = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
            turns += [{"role": "user", "content": text}, {"role": "assistant", "content": answer}]
        return turns

    @cached_property
    def _is_repeatable(self) -> bool:
        """True if equal jobs, possibly of a resumed run, have equal outputs."""
        is_certain = self.is_scored or self.is_pooled or self.has_label_probs
        return is_certain or self.fields.get("temperature") == 0 or self.fields.get("seed") is not None

    def check(self, first: Row | None) -> None:
        """Raise DatasetError for a recipe that no row can satisfy, before anything is submitted."""
        is_chat = not CHAT_FIELDS.isdisjoint(self.fields) and (self.chat or self.template is None)
        text: dict[str, Any] = (
            {"messages": [{"role": "user", "content": "x"}]} if is_chat else {"prompt": "x"}
        )
        given = [json.dumps(one) for one in self.fields.get("continuations") or ()]
        if twice := [one for one, count in Counter(given).items() if count > 1]:
            raise DatasetError(
                f"--continuation {twice[0]} is given twice; the output names each score by its text"
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
        if self.image_column is not None and not self.chat:
            raise DatasetError("pictures need the chat form: leave --no-chat out")
        columns = {} if first is None or first.fields is None else first.fields
        assert self._turns is not None, "they are made"
        for template in (self._template, self._system):
            if template is not None and columns:
                template.check_columns(columns)
        if self.image_column is not None and columns and self.image_column not in columns:
            raise DatasetError(f"unknown column {self.image_column!r}; the columns are: {', '.join(columns)}")
        if self._template is None and columns and not set(PROMPT_COLUMNS) & columns.keys():
            raise DatasetError(
                "the prompt is missing; write for instance --template 'Summarize: {{ text }}'; "
                f"the columns are: {', '.join(columns)}"
            )

    def job(
        self, row: Row, finish: Callable[[dict[str, Any]], dict[str, Any]] = lambda prompt: prompt
    ) -> Job | RowError:
        """Return the job of a row, or the error that prevents it. `finish` converts prompt fields to job fields."""
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
            return parse_job(fields | finish(self._prompt(row.fields)) | self._images(row))
        except NullRendered as error:
            return RowError("null_in_prompt", str(error), raw_text(row.fields), self.on_null == "skip")
        except TemplateFailed as error:
            return RowError("template_error", str(error), raw_text(row.fields))
        except InvalidJob as error:
            return RowError(error.code, str(error), raw_text(row.fields))

    def cut_off(self, kept: Mapping[str, Any], on_truncated: OnTruncated | None) -> Failure | None:
        """Return the failure of a result that ended at max_tokens, if that counts as a failure."""
        samples = kept["outputs"]
        choices = (self.fields.get("structured_outputs") or {}).get("choice") or ()
        is_cut = any(s.get("finish_reason") == "length" and s.get("text") not in choices for s in samples)
        if not is_cut or on_truncated == "label" or (on_truncated is None and not self.has_shape):
            return None
        return Failure("output_cut_off", "the output was cut off at max_tokens; raise --max-tokens")

    def _images(self, row: Row) -> dict[str, Any]:
        """Return the job's images. Raises NullRendered."""
        if None in row.images and self.on_null != "label":
            raise NullRendered("the picture is null")
        images = [image for image in row.images if image is not None]
        return {"images": images} if images else {}

    def _is_empty(self, columns: Mapping[str, Any]) -> bool:
        if self._template is not None:
            return self._template.is_empty(columns)
        given = [columns[name] for name in PROMPT_COLUMNS if name in columns]
        return bool(given) and all(map(is_blank, given))

    def _prompt(self, columns: Mapping[str, Any]) -> dict[str, Any]:
        if self._template is None:
            for name in PROMPT_COLUMNS:
                if columns.get(name) is not None:
                    return self._field_value(name, columns[name], columns)
            raise TemplateFailed(f"the row has none of {', '.join(PROMPT_COLUMNS)}")
        text = self._template.render(columns)
        return self._as_chat(text, columns) if self.chat else {"prompt": text}

    def _field_value(self, name: str, value: Any, columns: Mapping[str, Any]) -> dict[str, Any]:
        if name == "prompt" and self.chat and isinstance(value, str):
            return self._as_chat(value, columns)
        if name == "messages" and isinstance(value, str):
            try:
                value = json.loads(value)  # a CSV cell
            except json.JSONDecodeError as error:
                raise TemplateFailed(f"the messages column is not JSON: {error.msg}") from None
        if name == "messages" and self._system is not None and isinstance(value, list):
            value = [{"role": "system", "content": self._system.render(columns)}, *value]
        return {name: value}

    def _as_chat(self, text: str, columns: Mapping[str, Any]) -> dict[str, Any]:
        messages = [*self._turns, {"role": "user", "content": text}]
        if self._system is not None:
            messages.insert(0, {"role": "system", "content": self._system.render(columns)})
        return {"messages": messages}


def raw_text(fields: Mapping[str, Any]) -> str:
    """Return a row as shown in the errors file."""
    return shorten(json.dumps(fields, ensure_ascii=False))
