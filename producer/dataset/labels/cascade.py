"""A cascade: rows with an uncertain label are passed on to the next model, in the same run.

Its stages are the steps of a chain, each with a margin. Whether a row is passed on only depends on the journal's
answers: a killed and restarted run makes the same decisions.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.label_columns import LABEL, LabelColumns, LabelTemperature, label_columns
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.remote_model import RemoteModel, remote_model
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.step import Step
from pagemill.producer.dataset.steps.walk import StepState
from pagemill.producer.dataset.tables.writers import OUTPUT
from pagemill.producer.wire.schema.keys import ModelName

MAX_STAGES = 8
_model_name: TypeAdapter[str] = TypeAdapter(ModelName)


class Answers:
    """The answers of a cascade's stages for one row; `states` are those of its steps.

    `path`: from the first stage to the last one reached, where a failure comes last. `beyond`: answers from an earlier
    start with a higher margin, which have no effect.
    """

    def __init__(self, states: Iterable[StepState]) -> None:
        self.path: list[StepState] = []
        self.beyond: list[StepState] = []
        for state in states:
            if state.beyond is not None:
                self.beyond.append(replace(state, kept=state.beyond))
            elif not state.skipped:
                self.path.append(state)

    @property
    def stage(self) -> int:
        """The index of the stage with the final answer."""
        return len(self.path) - 1 - (self.path[-1].failure is not None)

    @property
    def final(self) -> StepState:
        return self.path[self.stage]

    def as_json(self) -> list[dict[str, Any]]:
        """Return all answers in the form of a line. `probs` are the model's own, at temperature 1."""
        return [_as_json(state) for state in (*self.path, *self.beyond)]


def _as_json(state: StepState) -> dict[str, Any]:
    model = state.step.recipe.model
    if state.failure is not None:
        return {"model": model, "error": f"{state.failure.code}: {state.failure.message}"}
    assert state.kept is not None
    sample, usage = state.sample, state.kept.get("usage") or {}
    probs = sample.get("label_probs")
    stored = {"label": sample["label"], "prob": None if probs is None else state.prob, "probs": probs}
    return {"model": model, **stored, "usage": usage}


class CascadeColumns(LabelColumns):
    """The columns of a cascade: those of the final answer, its stage, and all answers."""

    @property
    def types(self) -> dict[str, str]:
        added = {"stage": "integer", "model": "string", "answers": ""}
        return super().types | {f"{self.column}_{name}": kind for name, kind in added.items()}

    def scale(self, kept: Mapping[str, Any]) -> float:
        answers: Answers = kept["answers"]
        return answers.final.temperature

    def values(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        answers: Answers = kept["answers"]
        model = answers.final.step.recipe.model
        added = {"stage": answers.stage + 1, "model": model, "answers": answers.as_json()}
        return super().values(kept) | {f"{self.column}_{name}": value for name, value in added.items()}

    def restore(self, kept: dict[str, Any], fields: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Restore the answers of a cascade's line; that of a run with one model is the first stage's."""
        stored = fields.get(f"{self.column}_answers")
        stored = json.loads(stored) if isinstance(stored, str) else stored
        if not stored:
            super().restore(kept, fields, meta)
            return
        answers = [_journal_result(entry) for entry in stored]
        kept |= answers[0] or {}
        kept["later"] = {
            entry["model"]: answer for entry, answer in zip(stored[1:], answers[1:], strict=True) if answer
        }


class _Run(Protocol):
    """The properties of a run that the steps without a recipe depend on."""

    output_column: str
    label_temperature: LabelTemperature
    gold: str | None
    escalate_below: float | None
    to: Any
    api_budget: int | None
    api_key_file: Any


def chain_of(recipe: Recipe, run: _Run) -> Chain:
    """Return the steps of a run without a recipe, one per model. Raises DatasetError."""
    models = _later(run)
    column = run.output_column or (LABEL if recipe.has_label_probs else OUTPUT)
    scales = label_columns(recipe, column, run.label_temperature, run.gold, 1 + len(models))
    first = Step("", recipe, column, gold=run.gold, labels=scales[0] if scales else None)
    if run.escalate_below is None:
        if models:
            raise DatasetError(
                "--to needs --escalate-below, such as 0.8: it selects the rows for the other model"
            )
        return Chain((first,))
    _check(run, models, has_labels=bool(scales))
    stages = [replace(first, labels=CascadeColumns(column, scales[0].temperature))]
    # An adapter belongs to one base model.
    fields = {name: value for name, value in recipe.fields.items() if name != "adapter"}
    for model, labels in zip(models, scales[1:], strict=True):
        later = replace(
            first,
            name=model,
            recipe=replace(recipe, model=model, fields=fields),
            after=(stages[-1].name,),
            labels=CascadeColumns(column, labels.temperature),
            below=run.escalate_below,
        )
        stages.append(later)
    return Chain(tuple(stages))


def remote_of(run: _Run) -> RemoteModel | None:
    """Return the model of another API for the last stage. Raises DatasetError."""
    return remote_model(_later(run), run.api_budget, run.api_key_file)


def _later(run: _Run) -> tuple[str, ...]:
    return tuple([run.to] if isinstance(run.to, str) else run.to)


def _check(run: _Run, models: tuple[str, ...], *, has_labels: bool) -> None:
    if not models:
        raise DatasetError("--escalate-below needs --to MODEL, which gets the rows")
    if not has_labels:
        raise DatasetError(
            "--escalate-below goes by the probability of a label: add --choices a,b,c and --label-probs product"
        )
    if run.label_temperature == "fit":
        raise DatasetError(
            "which rows are passed on has to be known before a temperature can be fitted. Fit it on rows with gold "
            "values first, and give the number: --label-temperature 1.7, or 1.7,1.2 for two stages"
        )
    assert run.escalate_below is not None
    if not 0.0 < run.escalate_below <= 1.0:
        raise DatasetError("a margin is above 0 and at most 1")
    if len(models) >= MAX_STAGES:
        raise DatasetError(f"a cascade has at most {MAX_STAGES} stages")
    for model in models:
        try:
            _model_name.validate_python(model)
        except ValidationError as error:
            raise DatasetError(
                f"{model!r}: {error.errors()[0]['msg'].removeprefix('Value error, ')}"
            ) from None


def _journal_result(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the journal's result from which `_as_json` makes this entry; None for a failure."""
    if "label" not in entry:
        return None
    label = entry["label"]
    output = {"index": 0, "text": label, "finish_reason": "stop", "label": label}
    return {"outputs": [output | {"label_probs": entry.get("probs")}], "usage": entry.get("usage") or {}}
