"""The steps of a run, ordered so that each follows those that it waits for.

A recipe names its steps. A run without a recipe has one step without a name, and in a cascade another for each later
model, with its name.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.recipe import NO_MODEL
from pagemill.producer.dataset.schema_fields import NO_FIELDS, schema_fields
from pagemill.producer.dataset.steps.step import (
    SHAPES,
    STEP_KEYS,
    RecipeInvalid,
    Step,
    check_keys,
    step_of,
)
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.wire.schema.templates import NAME

MAX_STEPS = 16


@dataclass(frozen=True)
class Chain:
    steps: tuple[Step, ...]

    @classmethod
    def from_steps(cls, given: Any) -> Chain:
        """Return the steps of a recipe in YAML's form. Raises RecipeInvalid."""
        if not isinstance(given, Mapping):
            raise RecipeInvalid("a recipe is a mapping with steps")
        check_keys(given, {"model", "defaults", "steps"}, "the recipe")
        defaults = given.get("defaults") or {}
        if not isinstance(defaults, Mapping):
            raise RecipeInvalid("defaults is a mapping", "defaults")
        try:
            check_keys(defaults, STEP_KEYS - SHAPES.keys() | {"tenant"}, "defaults")
        except RecipeInvalid as error:
            raise RecipeInvalid(str(error), "defaults", *error.place) from None
        if "model" in given:
            defaults = {"model": given["model"], **defaults}
        listed = given.get("steps")
        if not isinstance(listed, list) or not 1 <= len(listed) <= MAX_STEPS:
            raise RecipeInvalid(f"steps is a list of 1 to {MAX_STEPS} steps", "steps")
        steps = list(_steps(listed, defaults))
        _check_columns(steps)
        _check_probabilities(steps)
        return cls(_ordered(steps))

    @property
    def first(self) -> Step:
        return self.steps[0]

    @property
    def columns(self) -> dict[str, str]:
        """Return the columns of all outputs, and their types."""
        return {name: kind for step in self.steps for name, kind in step.columns.items()}

    @property
    def is_recipe(self) -> bool:
        return bool(self.first.name)

    @property
    def at_once(self) -> tuple[Step, ...]:
        """Return the steps whose jobs are submitted with the row's: all except the later stages of a cascade."""
        return tuple(step for step in self.steps if step.below is None)

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(step.recipe.model for step in self.steps))

    def check(self, first: Row | None) -> None:
        """Raise DatasetError for steps that no row can satisfy, before anything is submitted."""
        for step in self.steps:
            try:
                step.check(first)
            except DatasetError as error:
                raise DatasetError(f"step {step.name}: {error}" if self.is_recipe else str(error)) from None
        names = [step.recipe.model for step in self.steps]
        if not self.is_recipe and (twice := next((name for name in names if names.count(name) > 1), None)):
            raise DatasetError(f"{twice} is a stage twice; every --to names another model")

    def settings(self, where: str | None, *, schema_columns: bool) -> dict[str, Any]:
        """Return everything that an output depends on except its row, as JSON."""
        if self.is_recipe:
            steps = {step.name: step.settings() for step in self.steps}
            return {"where": where, "steps": steps} | ({"schema_columns": True} if schema_columns else {})
        about = {
            "output_column": self.first.column,
            "where": where,
            "schema_columns": schema_columns,
            "to": self.models[1:] or None,
        }
        settings: dict[str, Any] = json.loads(json.dumps(self.first.recipe.settings() | about, default=str))
        return settings

    def with_recipes(self, **changes: Any) -> Chain:
        """Return these steps with other `on_null`, `on_empty` or `image_column`."""
        return Chain(tuple(replace(step, recipe=replace(step.recipe, **changes)) for step in self.steps))

    def with_schema_columns(self) -> Chain:
        """Return these steps with a column for each field of their JSON schemas. Raises DatasetError."""
        schemas = [(step.recipe.fields.get("structured_outputs") or {}).get("json") for step in self.steps]
        if not any(schemas):
            raise DatasetError(NO_FIELDS)
        chain = Chain(
            tuple(
                replace(step, fields=schema_fields(schema)) if schema else step
                for step, schema in zip(self.steps, schemas, strict=True)
            )
        )
        _check_columns(list(chain.steps))
        return chain

    def with_model(self, model: str) -> Chain:
        """Return these steps, with a model for those that name none."""
        return Chain(
            tuple(
                replace(step, recipe=replace(step.recipe, model=model))
                if step.recipe.model == NO_MODEL
                else step
                for step in self.steps
            )
        )


def _steps(listed: list[Any], defaults: Mapping[str, Any]) -> Iterator[Step]:
    names = []
    for index, each in enumerate(listed):
        if not isinstance(each, Mapping):
            raise RecipeInvalid(f"step {index + 1} is not a mapping", "steps", index)
        name = each.get("name")
        if not isinstance(name, str) or not re.fullmatch(NAME, name) or name == "row":
            raise RecipeInvalid(
                f"step {index + 1}: its name is a word of letters, digits and _, of 32 characters at most",
                "steps",
                index,
                "name",
            )
        if name in names:
            raise RecipeInvalid(f"two steps are called {name}", "steps", index, "name")
        names.append(name)
    for index, each in enumerate(listed):
        try:
            yield step_of(each, defaults, names)
        except RecipeInvalid as error:
            raise RecipeInvalid(str(error), "steps", index, *error.place) from None


def _check_columns(steps: list[Step]) -> None:
    taken: set[str] = set()
    for index, step in enumerate(steps):
        if twice := next((column for column in step.columns if column in taken), None):
            raise RecipeInvalid(
                f"step {step.name}: another step has a column {twice} too", "steps", index, "column"
            )
        taken |= step.columns.keys()


def _check_probabilities(steps: list[Step]) -> None:
    """Raise RecipeInvalid if a condition needs the probability of a step without probabilities."""
    known = {step.name for step in steps if step.recipe.has_label_probs}
    for index, step in enumerate(steps):
        asked = [(name, "prompt") for name, field in step.recipe.placed if field == "label_prob"]
        asked += [
            (name, "when")
            for name, condition in step.when.items()
            if condition.prob_at_least is not None or condition.prob_below is not None
        ]
        for name, where in asked:
            if name not in known:
                raise RecipeInvalid(
                    f"step {step.name}: {name} has no probability: give it choices, and label_probs: product",
                    "steps",
                    index,
                    where,
                )


def _ordered(steps: list[Step]) -> tuple[Step, ...]:
    try:
        TopologicalSorter({step.name: step.after for step in steps}).prepare()
    except CycleError as error:
        circle = error.args[1][::-1]
        place = next(index for index, step in enumerate(steps) if step.name in circle)
        raise RecipeInvalid(
            f"steps wait for each other: {' waits for '.join(circle)}", "steps", place
        ) from None
    ordered: dict[str, Step] = {}
    while len(ordered) < len(steps):  # in the recipe's order if it is valid
        following = next(s for s in steps if s.name not in ordered and ordered.keys() >= set(s.after))
        ordered[following.name] = following
    return tuple(ordered.values())
