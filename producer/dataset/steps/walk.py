"""The progress of a row's steps, according to the journal, and their remaining jobs.

The jobs of all steps are submitted together, and wait for each other in the queue. Work is identified by its content: a
step's key is a hash of its own job, with placeholders for the outputs that it reads, and of the keys of the steps that
it waits for. Outputs in the journal are inserted into the prompt here, since the server may have deleted their jobs.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from pagemill.producer.dataset.journal import Failure, Journal
from pagemill.producer.dataset.label_columns import scaled
from pagemill.producer.dataset.output_places import fill
from pagemill.producer.dataset.recipe import OnTruncated
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.step import Step
from pagemill.producer.dataset.tables.rows import Row, RowError
from pagemill.producer.dataset.work import CONDITION_FALSE, PARENT_FAILED, Follower, Work, stage_key
from pagemill.producer.wire.schema.dependencies import ITEM_PREFIX, SPACE, Condition
from pagemill.producer.wire.schema.job import Job
from pagemill.producer.wire.schema.templates import ParentOutput


@dataclass(frozen=True, slots=True)
class StepState:
    """One step of one row: ended with `kept` (as the journal keeps it) or `failure`, skipped, or with a `job` to do.

    None of these: a later stage of a cascade, before the answer of the previous stage.
    """

    step: Step
    key: str = ""
    kept: dict[str, Any] | None = None
    failure: Failure | None = None
    skipped: str = ""
    """The code of the reason why it does not run."""
    job: Job | None = None
    is_merged: bool = False
    """True if it was done by the job of an equal row."""
    is_repeatable: bool = True
    occurrence: int = 0
    """Number of rows up to this one with the same work."""
    beyond: dict[str, Any] | None = None
    """The answer of a cascade's stage that did not have to run, from an earlier start with a higher margin."""

    @property
    def is_open(self) -> bool:
        """True if the row waits for this step."""
        return self.kept is None and self.failure is None and not self.skipped

    @property
    def sample(self) -> Mapping[str, Any]:
        """Return its first output."""
        assert self.kept is not None
        sample: Mapping[str, Any] = self.kept["outputs"][0]
        return sample

    @property
    def temperature(self) -> float:
        """Return the scale of its label's probabilities."""
        return 1.0 if self.step.labels is None else self.step.labels.temperature

    @property
    def prob(self) -> float:
        """Return the label's probability at the step's temperature; 1.0 for a model of another API."""
        if self.sample.get("label_probs") is None:
            return 1.0
        return scaled(self.sample["label_probs"], self.temperature)[self.sample["label"]]

    @property
    def output(self) -> ParentOutput:
        """Return its output for other steps."""
        label = self.sample.get("label")
        prob = None if label is None else (self.sample.get("label_probs") or {}).get(label)
        text = self.sample["text"]
        return ParentOutput(id=self.step.name, state="succeeded", text=text, label=label, prob=prob)


@dataclass(frozen=True, slots=True)
class Walk:
    """Iterates over the steps of rows. `on_truncated`: the run's."""

    chain: Chain
    journal: Journal
    on_truncated: OnTruncated | None = None

    def works(self, rows: Iterable[Row]) -> Iterator[Work | Failure | None]:
        """Yield the work of all steps except a cascade's later stages.

        For a row without work in its first step, yield the reason of its failure, or None.
        """
        self.journal.start_reading()
        is_alone = len(self.chain.at_once) == 1
        for row in rows:
            # The loop itself looks up the work of a single step.
            states = [self._state(row, self.chain.first, {}, is_new=True)] if is_alone else self.states(row)
            for index, state in enumerate(states):
                if state.job is not None:
                    yield Work(state.key, state.job)
                elif not index:
                    yield state.failure

    def followers(self, rows: Callable[[], Iterable[Row]]) -> list[Follower]:
        """Return iterators over the work of each later stage of a cascade, as answers of the previous stage arrive."""

        def follower(index: int) -> Follower:
            return lambda: self._escalated(rows(), index)

        return [follower(index) for index, step in enumerate(self.chain.steps) if step.below is not None]

    def _escalated(self, rows: Iterable[Row], index: int) -> Iterator[Work | None]:
        for row in rows:
            while (state := next(islice(self.states(row), index, None))).is_open:
                if state.job is not None:
                    yield Work(state.key, state.job)
                    break
                yield None

    def states(self, row: Row) -> Iterator[StepState]:
        """Yield each step's state; the next state is determined when it is requested."""
        known: dict[str, StepState] = {}
        for step in self.chain.steps:
            parents = {name: self._looked_up(known[name]) for name in step.after}
            known[step.name] = state = self._state(row, step, parents)
            yield state

    def _looked_up(self, state: StepState) -> StepState:
        """Return the current state: meanwhile the job may have been collected, and its state dropped."""
        end = None if state.job is None else self.journal.end(state.key)
        return state if end is None else self._ended(replace(state, job=None), end)

    def _ended(self, state: StepState, end: dict[str, Any] | Failure) -> StepState:
        if isinstance(end, Failure):
            is_unmet = end.code == CONDITION_FALSE
            return replace(state, skipped=end.code) if is_unmet else replace(state, failure=end)
        failure = state.step.recipe.cut_off(end, self.on_truncated)
        return replace(state, kept=None if failure else end, failure=failure)

    def _stage(self, row: Row, step: Step, before: StepState) -> StepState:
        """Return the state of a cascade's later stage. It has the key of the first, except for its model."""
        if before.is_open:
            return StepState(step)
        key = stage_key(before.key.partition("@")[0], step.name)
        end = self.journal.end(key)
        state = StepState(step, key, is_merged=before.is_merged)
        assert step.below is not None
        if before.kept is None or before.prob >= step.below:
            beyond = None if isinstance(end, Failure) else end
            return replace(state, skipped=CONDITION_FALSE, beyond=beyond)
        if end is not None:
            return self._ended(state, end)
        job = step.recipe.job(row)
        return _refused(step, job) if isinstance(job, RowError) else replace(state, job=job)

    def _state(
        self, row: Row, step: Step, parents: Mapping[str, StepState], *, is_new: bool = False
    ) -> StepState:
        """Return the state of a step. `is_new`: without reading the journal."""
        if step.below is not None:
            return self._stage(row, step, *parents.values())
        if (blocked := _blocked(step, parents)) is not None:
            return blocked
        plain = plain_job(row, step)
        if isinstance(plain, RowError):
            return _refused(step, plain)
        repeatable = plain.is_repeatable and all(parent.is_repeatable for parent in parents.values())
        digest = _digest(plain, parents)
        count = self.journal.occurrence(f"{digest}@{step.name}")
        key = digest if repeatable else f"{digest}-{count}"
        if step.name:
            key = stage_key(key, step.name)
        state = StepState(
            step, key, is_merged=repeatable and count > 1, is_repeatable=repeatable, occurrence=count
        )
        if not is_new and (end := self.journal.end(key)) is not None:
            return self._ended(state, end)
        is_unmet = any(
            not is_met(condition, parents[name].output)
            for name, condition in step.when.items()
            if parents[name].kept is not None
        )
        if is_unmet:
            return replace(state, skipped=CONDITION_FALSE)
        job = self._job(row, step, parents) if step.recipe.places else plain
        if isinstance(job, RowError):
            return _refused(step, job)
        return replace(state, job=job)

    def _job(self, row: Row, step: Step, parents: Mapping[str, StepState]) -> Job | RowError:
        """Return the job of a step whose parents have not failed, with their known outputs in its prompt."""
        known = {name: parent.output for name, parent in parents.items() if parent.kept is not None}
        after = {
            name: ITEM_PREFIX + self.journal.name(parent.key)
            for name, parent in parents.items()
            if name not in known
        }
        when = {name: condition for name, condition in step.when.items() if name in after}

        def finish(prompt: dict[str, Any]) -> dict[str, Any]:
            filled = _filled(prompt, known, is_waiting=bool(after))
            return filled | ({"after": after} if after else {}) | ({"when": when} if when else {})

        return step.recipe.job(row, finish)


def plain_job(row: Row, step: Step) -> Job | RowError:
    """Return the job of a step with placeholders for all outputs of others, and without `after`: its content."""
    if not step.recipe.places:
        return step.recipe.job(row)
    return step.recipe.job(row, lambda prompt: _filled(prompt, {}, is_waiting=True))


def is_met(condition: Condition, given: ParentOutput) -> bool:
    """Return whether an output meets a condition, by the rules of the queue (`features/dependents.lua`)."""
    label = (given.text if given.label is None else given.label).strip(SPACE)
    return (
        (condition.label is None or label in condition.label)
        and (condition.text is None or given.text.strip(SPACE) in condition.text)
        and (
            condition.prob_at_least is None
            or (given.prob is not None and given.prob >= condition.prob_at_least)
        )
        and (condition.prob_below is None or (given.prob is not None and given.prob < condition.prob_below))
    )


def _filled(
    prompt: Mapping[str, Any], known: Mapping[str, ParentOutput], *, is_waiting: bool
) -> dict[str, Any]:
    if "messages" not in prompt:
        return {**prompt, "prompt": fill(prompt["prompt"], known, is_waiting=is_waiting)}
    messages = [
        {**message, "content": _filled_content(message.get("content"), known, is_waiting)}
        for message in prompt["messages"]
    ]
    return {**prompt, "messages": messages}


def _filled_content(content: Any, known: Mapping[str, ParentOutput], is_waiting: bool) -> Any:
    if isinstance(content, list):
        return [
            {**part, "text": fill(part["text"], known, is_waiting=is_waiting)}
            if isinstance(part, Mapping) and isinstance(part.get("text"), str)
            else part
            for part in content
        ]
    return content if content is None else fill(content, known, is_waiting=is_waiting)


def _digest(job: Job, parents: Mapping[str, StepState]) -> str:
    if not parents:
        return job.digest()
    given = [job.digest(), *(f"{name}={parent.key}" for name, parent in sorted(parents.items()))]
    return hashlib.sha256("\n".join(given).encode()).hexdigest()


def _blocked(step: Step, parents: Mapping[str, StepState]) -> StepState | None:
    """Return the resulting state if a step that was waited for has failed or was skipped."""
    for parent in parents.values():
        if parent.failure is not None:
            error = f"{parent.failure.code}: {parent.failure.message}"
            message = f"step {parent.step.name} has failed: {error}"
            if parent.failure.code == PARENT_FAILED:
                message = parent.failure.message
            return StepState(step, failure=Failure(PARENT_FAILED, message))
    skipped = next((parent.skipped for parent in parents.values() if parent.skipped), "")
    return StepState(step, skipped=skipped) if skipped else None


def _refused(step: Step, error: RowError) -> StepState:
    if error.is_skipped:
        return StepState(step, skipped=error.code)
    return StepState(step, failure=Failure(error.code, error.message))
