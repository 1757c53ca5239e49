"""A cascade: rows whose label a model is not sure of go on to the next model, in the same run.

A stage is the same work with another model, so its key is that of the row's work, "@" and the model. Whether a row goes
on follows from the answers in the journal alone: a run that is killed and started again takes the same way.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from pydantic import TypeAdapter, ValidationError

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.labels.columns import LabelColumns, LabelTemperature, label_columns, scaled
from pagemill.producer.dataset.recipe import Recipe
from pagemill.producer.dataset.work import Follower, Work, stage_key
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.keys import ModelName

MAX_STAGES = 8
_model_name: TypeAdapter[str] = TypeAdapter(ModelName)
_COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass(frozen=True, slots=True)
class Answer:
    """What one stage made of a row: a result as the journal keeps it, or the failure."""

    model: str
    kept: Mapping[str, Any] | None
    failure: Failure | None = None
    prob: float = 0.0
    """The label's probability, at the stage's temperature: what is held against the margin."""

    @property
    def sample(self) -> Mapping[str, Any]:
        assert self.kept is not None
        sample: Mapping[str, Any] = self.kept["outputs"][0]
        return sample

    def as_json(self) -> dict[str, Any]:
        """Return it as a line tells it. `probs` are the model's own, at temperature 1."""
        if self.failure is not None:
            return {"model": self.model, "error": f"{self.failure.code}: {self.failure.message}"}
        assert self.kept is not None
        told = {"label": self.sample["label"], "prob": self.prob, "probs": self.sample["label_probs"]}
        return {"model": self.model, **told, "usage": self.kept.get("usage") or {}}


@dataclass(frozen=True, slots=True)
class Answers:
    """All that is known of a row. `path`: from the first stage to where it ended, a failure last of all.

    `beyond`: answers that an earlier start with a higher margin has paid for; they decide nothing.
    """

    path: tuple[Answer, ...]
    beyond: tuple[Answer, ...] = ()

    @property
    def stage(self) -> int:
        """The index of the stage whose answer counts."""
        return len(self.path) - 1 - (self.path[-1].failure is not None)

    @property
    def final(self) -> Answer:
        return self.path[self.stage]


@dataclass(frozen=True, slots=True)
class Cascade:
    """`models`: those of the later stages, none for a run of one model. `temperatures`: of every stage."""

    below: float = 0.0
    models: tuple[str, ...] = ()
    temperatures: tuple[float, ...] = (1.0,)

    def check(self, first: str) -> None:
        """Raise DatasetError if two stages have the same model; `first` is that of the first stage."""
        names = (first, *self.models)
        if repeated := next((name for name in names if names.count(name) > 1), None):
            raise DatasetError(f"{repeated} is a stage twice; every --to names another model")

    def followers(self, journal: Journal, jobs: Callable[[], Iterable[Job]]) -> list[Follower]:
        """Return what yields the work of each later stage, as the answers of the stage before come in."""

        def follower(stage: int) -> Follower:
            return lambda: self._works(stage, journal, jobs())

        return [follower(stage) for stage in range(1, len(self.models) + 1)]

    def _works(self, stage: int, journal: Journal, jobs: Iterable[Job]) -> Iterator[Work | None]:
        for job in jobs:
            key = job.digest()
            while (step := self._step(journal, key, job.model))[1] and len(step[0]) < stage:
                yield None
            path, goes_on = step
            if goes_on and len(path) == stage:
                model = self.models[stage - 1]
                # An adapter is made for one base model.
                yield Work(stage_key(key, model), job.model_copy(update={"model": model, "adapter": None}))

    def kept(self, journal: Journal, key: str, first: str) -> dict[str, Any] | None:
        """Return the result that counts, with the tokens of all stages and, in a cascade, `answers`.

        None if the first stage has failed, or if an answer is missing.
        """
        if not self.models:
            return journal.output(key)
        path, goes_on = self._step(journal, key, first)
        if goes_on or path[0].failure is not None:
            return None
        known = (self._answer(journal, key, stage, first) for stage in range(len(path), len(self.models) + 1))
        answers = Answers(tuple(path), tuple(one for one in known if one is not None and one.kept))
        usages = [answer.kept.get("usage") or {} for answer in path if answer.kept is not None]
        usage = {name: sum(each.get(name) or 0 for each in usages) for name in _COUNTS}
        assert answers.final.kept is not None
        return {**answers.final.kept, "usage": usage, "answers": answers}

    def _step(self, journal: Journal, key: str, first: str) -> tuple[list[Answer], bool]:
        """Return the answers so far, and whether the row goes on to the stage that comes next."""
        path: list[Answer] = []
        for stage in range(len(self.models) + 1):
            answer = self._answer(journal, key, stage, first)
            if answer is None:
                return path, True
            path.append(answer)
            if answer.failure is not None or answer.prob >= self.below:
                break
        return path, False

    def _answer(self, journal: Journal, key: str, stage: int, first: str) -> Answer | None:
        model = self.models[stage - 1] if stage else first
        end = journal.end(stage_key(key, model) if stage else key)
        if end is None or isinstance(end, Failure):
            return None if end is None else Answer(model, None, end)
        sample = end["outputs"][0]
        prob = scaled(sample["label_probs"], self.temperatures[stage])[sample["label"]]
        return Answer(model, end, prob=prob)

    def recorded(self, kept: dict[str, Any], key: str) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield the key and the result of each stage's answer in a line that was read back."""
        later = kept.pop("later", {})
        yield key, kept
        for model, answer in later.items():
            yield stage_key(key, model), answer


@dataclass(frozen=True)
class CascadeColumns(LabelColumns):
    """The columns of a cascade: those of the answer that counts, which it is, and all answers."""

    cascade: Cascade = Cascade()

    @property
    def types(self) -> dict[str, str]:
        added = {"stage": "integer", "model": "string", "answers": ""}
        return super().types | {f"{self.column}_{name}": kind for name, kind in added.items()}

    def scale(self, kept: Mapping[str, Any]) -> float:
        answers: Answers = kept["answers"]
        return self.cascade.temperatures[answers.stage]

    def values(self, kept: Mapping[str, Any]) -> dict[str, Any]:
        answers: Answers = kept["answers"]
        told = [answer.as_json() for answer in (*answers.path, *answers.beyond)]
        added = {"stage": answers.stage + 1, "model": answers.final.model, "answers": told}
        return super().values(kept) | {f"{self.column}_{name}": value for name, value in added.items()}

    def restore(self, kept: dict[str, Any], fields: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
        """Take up the answers of a cascade's line; that of a run of one model is the first stage's."""
        told = fields.get(f"{self.column}_answers")
        told = json.loads(told) if isinstance(told, str) else told
        if not told:
            super().restore(kept, fields, meta)
            return
        answers = [_kept(entry) for entry in told]
        kept |= answers[0] or {}
        kept["later"] = {
            entry["model"]: answer for entry, answer in zip(told[1:], answers[1:], strict=True) if answer
        }


class _Run(Protocol):
    """What a cascade depends on in a run."""

    output_column: str
    label_temperature: LabelTemperature
    gold: str | None
    recipe: Recipe
    escalate_below: float | None
    to: Any


def cascade_of(run: _Run) -> tuple[Cascade, LabelColumns | None]:
    """Return a run's cascade, of no later stages if it has none, and its columns of labels. Raises DatasetError."""
    models = tuple([run.to] if isinstance(run.to, str) else run.to)
    columns = label_columns(run, 1 + len(models))
    if run.escalate_below is None:
        if models:
            raise DatasetError("say which rows go to another model: --escalate-below 0.8 beside --to")
        return Cascade(), columns
    if not models:
        raise DatasetError("say to which model rows go: --to MODEL beside --escalate-below")
    if columns is None:
        raise DatasetError(
            "--escalate-below goes by the probability of a label: add --choices a,b,c and --label-probs product"
        )
    if run.label_temperature == "fit":
        raise DatasetError(
            "which rows go on has to be known before a temperature can be fitted. Fit it on rows with gold values "
            "first, and give the number: --label-temperature 1.7, or 1.7,1.2 for two stages"
        )
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
    scale = run.label_temperature
    temperatures = tuple(scale) if isinstance(scale, tuple | list) else (float(scale),) * (1 + len(models))
    cascade = Cascade(run.escalate_below, models, temperatures)
    return cascade, CascadeColumns(columns.column, columns.temperature, cascade)


def _kept(entry: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the journal's result of which `Answer.as_json` makes this entry; None for a failure."""
    if "probs" not in entry or entry["probs"] is None:
        return None
    label = entry["label"]
    output = {"index": 0, "text": label, "finish_reason": "stop", "label": label}
    return {"outputs": [output | {"label_probs": entry["probs"]}], "usage": entry.get("usage") or {}}
