"""A row's line in the output, with the results of all its steps: created, and read back from a finished output."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagemill.producer.dataset.labels.cascade import Answers
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.figures import COUNTS
from pagemill.producer.dataset.steps.walk import StepState
from pagemill.producer.dataset.tables.rows import Row
from pagemill.producer.dataset.tables.writers import META, STEPS
from pagemill.producer.dataset.work import stage_key


@dataclass(frozen=True, slots=True)
class RowLines:
    """The lines of one run. `path`: the output's."""

    chain: Chain
    path: Path

    def result(self, states: list[StepState]) -> dict[str, Any]:
        """Return the results of a row's steps as one result, with the tokens of all.

        For a recipe: all outputs, and the time of the last. For a cascade: the final answer, and `answers`.
        """
        kept = [state.kept for state in states if state.kept is not None]
        if len(self.chain.steps) == 1 and not self.chain.is_recipe:
            return kept[0]
        usage = {name: sum((each.get("usage") or {}).get(name) or 0 for each in kept) for name in COUNTS}
        if not self.chain.is_recipe:
            return {**kept[-1], "usage": usage, "answers": Answers(states)}
        outputs = [sample for each in kept for sample in each["outputs"]]
        timed = [each["timing"] for each in kept if each.get("timing")]
        timing = {"timing": timed[-1]} if len(timed) == len(kept) else {}
        return {"outputs": outputs, "usage": usage, **timing}

    def make(self, row: Row, states: list[StepState], result: Mapping[str, Any]) -> dict[str, Any]:
        """Return the input's columns, those of the steps in order, and the data of each step of a recipe."""
        if not self.chain.is_recipe:
            first = states[0]
            digest = first.key.partition("-")[0]
            return first.step.lines.make(row, f"{digest}-{first.occurrence}", result)
        added: dict[str, Any] = dict.fromkeys(self.chain.columns)
        step_facts: dict[str, Any] = {}
        for state in states:
            if state.kept is not None:
                made = state.step.lines.make(Row(row.number, {}), state.key, state.kept)
                step_facts[state.step.name] = made.pop(META)
                added |= made
            elif state.failure is not None:
                step_facts[state.step.name] = {"error": f"{state.failure.code}: {state.failure.message}"}
            else:
                step_facts[state.step.name] = {"skipped": state.skipped}
        columns = {name: value for name, value in (row.fields or {}).items() if name != META}
        meta = {
            "key": "",
            "row": row.number,
            "finish_reason": None,
            "usage": result["usage"],
            STEPS: step_facts,
        }
        return {**columns, **added, META: meta}

    def read(self, fields: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]] | None:
        """Return the keys of the work in a line, and its results as far as known; None if it is not a line of a run."""
        if not self.chain.is_recipe:
            line = self.chain.first.lines.read(fields, self.path)
            return None if line is None else list(_works(*line))
        meta = _loaded(fields.get(META))
        step_facts = _loaded(meta.get(STEPS)) if isinstance(meta, dict) else None
        if not isinstance(step_facts, dict):
            return None
        found = []
        for step in self.chain.steps:
            about = step_facts.get(step.name)
            read = step.lines.read({**fields, META: about}, self.path) if isinstance(about, dict) else None
            if read is not None:
                found.append(read)
        return found


def _works(name: str, kept: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the work of a line without steps: under its name, and under its content, which equal rows share."""
    digest, _, occurrence = name.partition("-")
    later = kept.pop("later", {})
    yield name, kept
    if occurrence == "1":
        yield digest, kept
    for model, answer in later.items():
        yield stage_key(digest, model), answer


def _loaded(value: Any) -> Any:
    try:
        return json.loads(value) if isinstance(value, str) else value
    except json.JSONDecodeError:
        return None
