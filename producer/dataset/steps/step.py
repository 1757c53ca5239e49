"""One step of a recipe: its request, its conditions, and the columns of its output."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from functools import cached_property
from typing import Any

from pydantic import TypeAdapter, ValidationError

from pagemill.producer.client.job_fields import RowFields
from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.label_columns import LabelColumns
from pagemill.producer.dataset.lines import OutputLines
from pagemill.producer.dataset.output_places import StepPlace
from pagemill.producer.dataset.recipe import NO_MODEL, Recipe
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.tables.writers import META
from pagemill.producer.wire.schema.dependencies import Condition

NOT_FOR_STEPS = frozenset(
    {"task", "continuations", "inputs", "documents", "dimensions", "prompt_name", "rows_dtype", "truncate"}
    | {"idempotency_key", "key", "dedupe", "keep_input", "webhook", "traceparent", "tenant"}
    | {"n", "best_of", "beam_width"}
)
"""Fields of a job that a step does not support: it generates one text, and its jobs are the run's own."""
JOB_KEYS = frozenset(RowFields.__annotations__) - NOT_FOR_STEPS | {"temperature"}
SHAPES = {"choices": "choice", "json_schema": "json", "regex": "regex"}
STEP_KEYS = JOB_KEYS | SHAPES.keys() | {"model", "system", "chat"}
"""Further keys that `defaults` may contain."""
OWN_KEYS = frozenset({"name", "prompt", "column", "after", "when", "examples", "gold"})
_conditions: TypeAdapter[Condition] = TypeAdapter(Condition)


class RecipeInvalid(DatasetError):
    """An error in a recipe. `place`: the keys and indexes that lead to it."""

    def __init__(self, message: str, *place: str | int) -> None:
        super().__init__(message)
        self.place = place


@dataclass(frozen=True)
class Step:
    """`after`: the names of the steps whose ends it waits for; `when`: the conditions on their outputs."""

    name: str
    """Empty for the only step, or the first, of a run without a recipe."""
    recipe: Recipe
    column: str
    after: tuple[str, ...] = ()
    when: Mapping[str, Condition] = field(default_factory=dict)
    gold: str | None = None
    labels: LabelColumns | None = None
    """The columns of a step with `label_probs`."""
    fields: Mapping[str, str] = field(default_factory=dict)
    """The fields of its JSON schema with separate columns, and their types."""
    below: float | None = None
    """Of a cascade's later stage: it runs if the label of the previous stage is less probable than this. Decided in the
    run, since the queue does not scale probabilities."""

    @cached_property
    def lines(self) -> OutputLines:
        return OutputLines(self.recipe, self.column, self.fields, self.labels)

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of its output, and their types."""
        fields = {f"{self.column}.{name}": kind for name, kind in self.fields.items()}
        return {self.column: "", **fields, **(self.labels.types if self.labels is not None else {})}

    def check(self, first: Row | None) -> None:
        """Raise DatasetError for a step that no row can satisfy."""
        self.recipe.check(first)
        columns = (first.fields if first else None) or {}
        if self.gold is not None and columns and self.gold not in columns:
            raise DatasetError(f"unknown column {self.gold!r}; the columns are: {', '.join(columns)}")

    def settings(self) -> dict[str, Any]:
        """Return everything that its output depends on except the row, as JSON."""
        when = {name: condition.model_dump(exclude_none=True) for name, condition in self.when.items()}
        about = {"column": self.column, "after": sorted(self.after), "when": when}
        settings: dict[str, Any] = json.loads(json.dumps(self.recipe.settings() | about, default=str))
        return settings


def step_of(given: Mapping[str, Any], defaults: Mapping[str, Any], names: Collection[str]) -> Step:
    """Return the step that a recipe describes; `names` are those of all its steps. Raises RecipeInvalid."""
    name = given["name"]
    check_keys(given, STEP_KEYS | OWN_KEYS, f"step {name}")
    for key, kind in (
        ("prompt", str),
        ("system", str),
        ("column", str),
        ("model", str),
        ("chat", bool),
        ("gold", str),
    ):
        if key in given and not isinstance(given[key], kind):
            raise RecipeInvalid(f"step {name}: {key} is {'true or false' if kind is bool else 'a text'}", key)
    if not given.get("prompt"):
        raise RecipeInvalid(f"step {name} has no prompt")
    others = [other for other in names if other != name]
    own = {**defaults, **given}
    shapes = [key for key in SHAPES if own.get(key) is not None]
    if len(shapes) > 1:
        raise RecipeInvalid(f"step {name}: give one of {', '.join(shapes)}", shapes[1])
    fields = {"temperature": 0.0} | {key: own[key] for key in own if key in JOB_KEYS}
    if shapes:
        fields["structured_outputs"] = {SHAPES[shapes[0]]: own[shapes[0]]}
    recipe = Recipe(
        own.get("model", NO_MODEL),
        own["prompt"],
        own.get("system"),
        own.get("chat", True),
        fields,
        places={other: StepPlace(other) for other in names},
        examples=_examples(given.get("examples"), others),
    )
    try:
        read = recipe.placed
    except DatasetError as error:
        raise RecipeInvalid(f"step {name}: {error}", "prompt") from None
    try:
        recipe.check(None)
    except DatasetError as error:
        raise RecipeInvalid(f"step {name}: {error}") from None
    when = _when(given.get("when"), name, others)
    after = dict.fromkeys(
        [*_after(given.get("after"), name, others), *when, *sorted({other for other, _ in read})]
    )
    column = given.get("column", name)
    if column == META:
        raise RecipeInvalid(f"step {name}: a column is not called {META}", "column")
    labels = LabelColumns(column) if recipe.has_label_probs else None
    return Step(name, recipe, column, tuple(after), when, given.get("gold"), labels)


def check_keys(given: Mapping[str, Any], known: Collection[str], what: str) -> None:
    """Raise RecipeInvalid for an unknown key."""
    for key in given:
        if key not in known:
            alike = get_close_matches(str(key), sorted(known), 1)
            hint = f"; did you mean {alike[0]}?" if alike else ""
            raise RecipeInvalid(f"{what}: unknown key {key!r}{hint}", key)


def _after(given: Any, name: str, others: list[str]) -> list[str]:
    listed = [given] if isinstance(given, str) else given or []
    if not isinstance(listed, list) or any(each not in others for each in listed):
        raise RecipeInvalid(
            f"step {name}: after lists other steps: {', '.join(others) or 'there are none'}", "after"
        )
    return listed


def _when(given: Any, name: str, others: list[str]) -> dict[str, Condition]:
    """Return a step's conditions; a bare label, or a list of them, means {label: ...}."""
    conditions = {}
    if given is not None and not isinstance(given, Mapping):
        raise RecipeInvalid(
            f"step {name}: when has a condition for each step's name: {{STEP: {{label: yes}}}}", "when"
        )
    for other, condition in (given or {}).items():
        if other not in others:
            raise RecipeInvalid(
                f"step {name}: when: unknown step {other}; the other steps are {', '.join(others) or 'none'}",
                "when",
                other,
            )
        try:
            asked = condition if isinstance(condition, Mapping) else {"label": condition}
            conditions[other] = _conditions.validate_python(asked)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            message = first["msg"].removeprefix("Value error, ")
            raise RecipeInvalid(
                f"step {name}: when: {other}{'.' if where else ''}{where}: {message}", "when", other
            ) from None
    return conditions


def _examples(given: Any, others: Collection[str]) -> tuple[dict[str, Any], ...]:
    """Return examples with the outputs of other steps in the form that a template reads."""
    if given is None:
        return ()
    if not isinstance(given, list) or not all(isinstance(example, Mapping) for example in given):
        raise RecipeInvalid("examples are a list of rows, each with an output", "examples")
    return tuple(
        {key: _read_by(value) if key in others else value for key, value in each.items()} for each in given
    )


def _read_by(output: Any) -> Any:
    if isinstance(output, Mapping) and {"text", "label", "parsed"} & output.keys():
        return output
    text = output if isinstance(output, str) else json.dumps(output, ensure_ascii=False)
    return {"text": text, "label": text, "parsed": output}
