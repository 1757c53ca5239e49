"""The report's statistics of a recipe, by step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.dataset.label_columns import as_label
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.step import Step
from pagemill.producer.dataset.steps.walk import StepState
from pagemill.producer.dataset.tables.rows import Row

COUNTS = ("prompt_tokens", "completion_tokens", "cached_tokens")


@dataclass
class StepCounts:
    """One step. Tokens are of jobs, each counted once; the other counts are of rows."""

    step: Step
    rows: int = 0
    """Rows with an output."""
    skipped: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    tokens: Counter[str] = field(default_factory=Counter)
    compared: int = 0
    agreed: int = 0

    def add(self, state: StepState, value: Any, columns: Mapping[str, Any]) -> None:
        """Add one row's step, and the value of its column."""
        if state.skipped:
            self.skipped[state.skipped] += 1
        elif state.failure is not None:
            self.failed[state.failure.code] += 1
        elif state.kept is not None:
            self.rows += 1
            if not state.is_merged:
                self.tokens.update({name: (state.kept.get("usage") or {}).get(name) or 0 for name in COUNTS})
            gold = columns.get(self.step.gold) if self.step.gold is not None else None
            if gold is not None:
                self.compared += 1
                self.agreed += as_label(gold) == as_label(value)

    def as_json(self) -> dict[str, Any]:
        return {
            "name": self.step.name,
            "model": self.step.recipe.model,
            "column": self.step.column,
            "rows": self.rows,
            "skipped": dict(self.skipped.most_common()),
            "failed": dict(self.failed.most_common()),
            **{name: self.tokens[name] for name in COUNTS},
            "gold": self.step.gold,
            "accuracy": self.agreed / self.compared if self.compared else None,
        }


class StepFigures:
    """All steps of one run."""

    def __init__(self, chain: Chain) -> None:
        self.steps = {step.name: StepCounts(step) for step in chain.steps}
        self.failed = 0
        """Rows with an output in which a step has failed."""
        self.first_failure: str | None = None

    def add(self, row: Row, states: list[StepState], line: Mapping[str, Any]) -> None:
        """Add a row's steps. `line`: its output; empty if it has none."""
        for state in states:
            self.steps[state.step.name].add(state, line.get(state.step.column), row.fields or {})
        failed = next((state for state in states if state.failure is not None), None)
        if line and failed is not None and failed.failure is not None:
            self.failed += 1
            about = f"{failed.failure.code}: step {failed.step.name}: {failed.failure.message}"
            self.first_failure = self.first_failure or f"row {row.number}: {about}"

    def as_json(self) -> list[dict[str, Any]]:
        return [step.as_json() for step in self.steps.values()]
