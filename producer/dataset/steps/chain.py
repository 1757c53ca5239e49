"""The steps of a recipe, in an order in which each comes after those that it waits for."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from pagemill.producer.dataset.recipe import NO_MODEL
from pagemill.producer.dataset.steps.step import (
    SHAPES,
    STEP_KEYS,
    RecipeInvalid,
    Step,
    check_keys,
    step_of,
)
from pagemill.producer.wire.schema.templates import NAME

MAX_STEPS = 16


@dataclass(frozen=True)
class Chain:
    steps: tuple[Step, ...]

    @classmethod
    def of(cls, given: Any) -> Chain:
        """Return the steps that a recipe describes, as YAML gives it. Raises RecipeInvalid."""
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
        """The columns of all outputs, and their types."""
        return {name: kind for step in self.steps for name, kind in step.columns.items()}

    def with_recipes(self, **changes: Any) -> Chain:
        """Return these steps with other `on_null` or `on_empty`."""
        return Chain(tuple(replace(step, recipe=replace(step.recipe, **changes)) for step in self.steps))

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
            raise RecipeInvalid(f"step {index + 1} is no mapping", "steps", index)
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
    """Raise RecipeInvalid where a probability is asked of a step that gives none."""
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
    while len(ordered) < len(steps):  # in the recipe's order where that is one
        following = next(s for s in steps if s.name not in ordered and ordered.keys() >= set(s.after))
        ordered[following.name] = following
    return tuple(ordered.values())
