"""A dataset run of several steps a row."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.dataset.errors import DatasetError
from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.recipe import Recipe, raw_text
from pagemill.producer.dataset.record import Totals, differences
from pagemill.producer.dataset.run import DatasetRun
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.figures import COUNTS, StepFigures
from pagemill.producer.dataset.steps.walk import StepState, Walk, plain_job
from pagemill.producer.dataset.summary import Summary
from pagemill.producer.dataset.tables.rows import Row, RowError
from pagemill.producer.dataset.tables.writers import META, STEPS, Writer
from pagemill.producer.dataset.work import Work
from pagemill.producer.wire.schema.job import Job

REFUSED = ("gold", "schema_columns", "escalate_below", "to", "output_column")
"""Options of a run that a recipe says itself, or that are not for it."""


@dataclass
class RecipeRun(DatasetRun):
    """One run of a recipe's steps, `chain`; `recipe` is the first one's."""

    recipe: Recipe = field(init=False)
    chain: Chain = field(kw_only=True)

    def __post_init__(self) -> None:
        if named := [name for name in REFUSED if getattr(self, name)]:
            raise DatasetError(f"{named[0]} is not for a recipe, which says it by step")
        self.recipe = self.chain.first.recipe
        self.output_column = next(iter(self.chain.columns))
        super().__post_init__()
        self._take_chain(self.chain.with_recipes(on_null=self.on_null, on_empty=self.on_empty))

    def _take_chain(self, chain: Chain) -> None:
        self.chain, self.recipe = chain, chain.first.recipe

    @property
    def more_columns(self) -> dict[str, str]:
        return {name: kind for name, kind in self.chain.columns.items() if name != self.output_column}

    @property
    def models(self) -> list[str]:
        return list(dict.fromkeys(step.recipe.model for step in self.chain.steps))

    def use_model(self, name: str) -> None:
        self._take_chain(self.chain.with_model(name))

    def previews(self) -> Iterator[tuple[Row, str, Job | RowError]]:
        """Yield the rows and the jobs of all their steps, with places for what they take from others."""
        self._check(self._first_row())
        for row in self._rows():
            for step in self.chain.steps:
                yield row, step.name, plain_job(row, step)

    def _check(self, first: Row | None) -> None:
        for step in self.chain.steps:
            try:
                step.recipe.check(first)
            except DatasetError as error:
                raise DatasetError(f"step {step.name}: {error}") from None
            columns = (first.fields if first else None) or {}
            if step.gold is not None and columns and step.gold not in columns:
                raise DatasetError(f"step {step.name}: gold: there is no column {step.gold!r}")
        super()._check(first)

    def _check_jobs(self) -> None:
        """Raise DatasetError if there are rows, and none of them makes a job of any step."""
        count, first = 0, None
        for row in self._rows():
            for step in self.chain.steps:
                job = plain_job(row, step)
                if isinstance(job, Job):
                    return
                first = first or f"row {row.number}: {job.code}: {job.message}"
            count += 1
        if count:
            raise DatasetError(f"none of the {count:,} rows makes a job; {first}")

    def _stage_names(self) -> Sequence[str]:
        return [step.name for step in self.chain.steps[1:]]

    def _walk(self, journal: Journal) -> Walk:
        journal.start_reading()
        return Walk(self.chain, journal, self.on_cut)

    def _works(self, journal: Journal) -> Iterator[Work | None]:
        walk = self._walk(journal)
        for row in self._rows():
            if row.error is not None:
                yield None
                continue
            for index, state in enumerate(walk.states(row)):
                if state.job is not None:
                    yield Work(state.key, state.job)
                elif not index:
                    yield None

    def _complaint(self, key: str, kept: Mapping[str, Any]) -> Failure | None:
        name = key.partition("~")[0].partition("@")[2]
        step = next((step for step in self.chain.steps if step.name == name), self.chain.first)
        return step.recipe.cut_off(kept, self.on_cut)

    def _summary(self, journal: Journal, totals: Totals) -> Summary:
        return Summary(price_per_hour=self.price_per_hour, totals=totals, steps=StepFigures(self.chain))

    def _more_meta(self) -> Sequence[str]:
        return (STEPS,)

    def _write_rows(self, journal: Journal, summary: Summary, output: Writer, errors: Writer) -> None:
        walk = self._walk(journal)
        for row in self._rows():
            if row.error is not None:
                self._write_error(summary, errors, row, row.error)
                continue
            states = list(walk.states(row))
            if any(state.job is not None for state in states):
                self.on_end(row.number, {})
                summary.add_unfinished()
            elif any(state.kept is not None for state in states):
                self._write_line(summary, output, errors, row, states)
            else:
                self._count_steps(summary, row, states, {})
                self._write_error(summary, errors, row, _ended(row, states))

    def _write_line(
        self, summary: Summary, output: Writer, errors: Writer, row: Row, states: list[StepState]
    ) -> None:
        """Write what the steps gave, with null for those that gave nothing, and tell of those that failed."""
        line = self._line(row, states)
        output.write(line)
        self.on_row(line)
        self.on_end(row.number, line)
        result = _together(states)
        summary.add_sample(row, {name: line[name] for name in self.chain.columns})
        is_merged = all(state.is_merged for state in states if state.kept is not None)
        summary.add_success(result, line[self.output_column], None, is_merged=is_merged)
        self._count_steps(summary, row, states, line)
        failed = [state for state in states if state.failure is not None]
        for state in failed:
            assert state.failure is not None
            about = {"row": row.number, "step": state.step.name, "raw": raw_text(row.fields or {})}
            errors.write(about | {"code": state.failure.code, "message": state.failure.message})
        if failed and summary.steps is not None:
            error = _ended(row, states)
            summary.steps.failed += 1
            summary.steps.first_failure = (
                summary.steps.first_failure or f"row {row.number}: {error.code}: {error.message}"
            )

    def _count_steps(
        self, summary: Summary, row: Row, states: list[StepState], line: Mapping[str, Any]
    ) -> None:
        assert summary.steps is not None
        for state in states:
            summary.steps.steps[state.step.name].add(state, line.get(state.step.column), row.fields or {})

    def _line(self, row: Row, states: list[StepState]) -> dict[str, Any]:
        """Return the input's columns, those of the steps in the recipe's order, and what is known of each step."""
        added: dict[str, Any] = dict.fromkeys(self.chain.columns)
        told: dict[str, Any] = {}
        for state in states:
            if state.kept is not None:
                made = state.step.lines.make(Row(row.number, {}), state.key, state.kept)
                told[state.step.name] = made.pop(META)
                added |= made
            elif state.failure is not None:
                told[state.step.name] = {"error": f"{state.failure.code}: {state.failure.message}"}
            else:
                told[state.step.name] = {"skipped": state.skipped}
        columns = {name: value for name, value in (row.fields or {}).items() if name != META}
        usage = _together(states)["usage"]
        meta = {"key": "", "row": row.number, "finish_reason": None, "usage": usage, STEPS: told}
        return {**columns, **added, META: meta}

    def _take(self, journal: Journal, fields: Mapping[str, Any]) -> int | None:
        """Record the work of each step that a line has an output of."""
        meta = _loaded(fields.get(META))
        told = _loaded(meta.get(STEPS)) if isinstance(meta, dict) else None
        if not isinstance(told, dict):
            return None
        tokens = 0
        for step in self.chain.steps:
            about = told.get(step.name)
            read = step.lines.read({**fields, META: about}, self.path) if isinstance(about, dict) else None
            if read is not None:
                key, kept = read
                journal.record(key, kept, None)
                tokens += kept["usage"].get("completion_tokens") or 0
        return tokens

    def _knows_a_row(self, journal: Journal) -> bool:
        walk = self._walk(journal)
        return any(
            state.kept is not None for row in self._rows() if row.error is None for state in walk.states(row)
        )

    def _check_same(self, then: dict[str, Any], name: object) -> None:
        """Raise DatasetError for other settings. Steps may be added."""
        now = self._settings()
        known = then.get("steps") or {}
        if differing := differences(then | {"steps": None}, now | {"steps": None}):
            raise DatasetError(
                f"{name} is of a run with other settings ({differing}). "
                "Choose another --out, or start over with --overwrite"
            )
        for step, settings in known.items():
            if step not in now["steps"]:
                raise DatasetError(f"{name} has a step {step}, which the recipe lacks; choose another --out")
            if differing := differences(settings, now["steps"][step]):
                raise DatasetError(
                    f"{name} is of a recipe whose step {step} was another ({differing}). "
                    "Choose another --out, or start over with --overwrite"
                )

    def _settings(self) -> dict[str, Any]:
        return {"where": self.where, "steps": {step.name: step.settings() for step in self.chain.steps}}


def _together(states: list[StepState]) -> dict[str, Any]:
    """Return what the steps of a row gave as one result, with the tokens of all and the time of the last."""
    kept = [state.kept for state in states if state.kept is not None]
    usage = {name: sum((each.get("usage") or {}).get(name) or 0 for each in kept) for name in COUNTS}
    outputs = [sample for each in kept for sample in each["outputs"]]
    timed = [each["timing"] for each in kept if each.get("timing")]
    timing = {"timing": timed[-1]} if len(timed) == len(kept) else {}
    return {"outputs": outputs, "usage": usage, **timing}


def _ended(row: Row, states: list[StepState]) -> RowError:
    """Return the first step's failure, or why all were left out."""
    for state in states:
        if state.failure is not None:
            message = f"step {state.step.name}: {state.failure.message}"
            return RowError(state.failure.code, message, raw_text(row.fields or {}))
    return RowError(states[0].skipped, "no step was to run", raw_text(row.fields or {}), True)


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return None
