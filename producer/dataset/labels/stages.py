"""The report's figures of a cascade: rows, tokens, time and accuracy by stage, and the curve over margins."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from pagemill.producer.dataset.label_columns import as_label, by_label
from pagemill.producer.dataset.labels.calibration import Calibration, GoldSample
from pagemill.producer.dataset.labels.cascade import Answers
from pagemill.producer.dataset.labels.curve import Curve, Step
from pagemill.producer.dataset.steps.chain import Chain
from pagemill.producer.dataset.steps.walk import StepState


@dataclass
class StageCounts:
    """One stage. Tokens and seconds are of jobs, each counted once; the other counts are of rows."""

    model: str
    temperature: float
    rows: int = 0
    """Rows that reached this stage; those without an answer are in `failed`."""
    final: int = 0
    """Rows whose final answer is from this stage."""
    failed: Counter[str] = field(default_factory=Counter)
    first_failure: str | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    cached_tokens: int = 0
    jobs: int = 0
    timed_jobs: int = 0
    seconds: float = 0.0
    """Time from start to end of its jobs, summed: concurrent jobs share a device."""
    compared: Counter[bool] = field(default_factory=Counter)
    """Rows with a gold value and an answer from this stage, by whether it is the final one..."""
    right: Counter[bool] = field(default_factory=Counter)
    """...and those where it is correct."""
    sample: GoldSample = field(default_factory=GoldSample)
    calibration: Calibration = field(init=False)

    def __post_init__(self) -> None:
        self.calibration = Calibration(self.sample, None, self.temperature)

    def add(self, answer: StepState, step: Step | None, *, is_final: bool, is_merged: bool) -> None:
        """Add one row's answer; `step` is the same for the curve, None for a failure."""
        self.rows += 1
        self.final += is_final
        if answer.failure is not None:
            self.failed[answer.failure.code] += 1
            self.first_failure = self.first_failure or f"{answer.failure.code}: {answer.failure.message}"
        if answer.kept is None or step is None:
            return
        if not is_merged:
            usage = answer.kept.get("usage") or {}
            self.jobs += 1
            self.timed_jobs += step.seconds is not None
            self.seconds += step.seconds or 0.0
            self.prompt_tokens += usage.get("prompt_tokens") or 0
            self.completion_tokens += usage.get("completion_tokens") or 0
            self.cached_tokens += usage.get("cached_tokens") or 0
        if step.is_right is not None:
            self.compared[is_final] += 1
            self.right[is_final] += step.is_right
            if answer.sample.get("label_probs") is not None:
                self.calibration.bins.add(answer.prob, is_right=step.is_right)

    def as_json(self, rows: int) -> dict[str, Any]:
        self.calibration.fitted = self.calibration.fitted or self.sample.fit()
        return {
            "model": self.model,
            "rows": self.rows,
            "share": self.rows / rows if rows else None,
            "final": self.final,
            "failed": dict(self.failed.most_common()),
            "first_failure": self.first_failure,
            "jobs": self.jobs,
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "cached_tokens": self.cached_tokens,
            "seconds": self.seconds if self.timed_jobs else None,
            "timed_jobs": self.timed_jobs,
            "accuracy": _ratio(self.right.total(), self.compared.total()),
            "accuracy_final": _ratio(self.right[True], self.compared[True]),
            "accuracy_passed_on": _ratio(self.right[False], self.compared[False]),
            "calibration": self.calibration.as_json(),
        }


class StageFigures:
    """All stages of one run, and its curve."""

    def __init__(self, chain: Chain) -> None:
        self.below = chain.steps[-1].below or 0.0
        self.stages = [
            StageCounts(step.recipe.model, step.labels.temperature)
            for step in chain.steps
            if step.labels is not None
        ]
        self.curve = Curve(self.below)

    def add(self, answers: Answers, gold: str | None, *, is_merged: bool) -> None:
        """Add one row, with its gold value in the form used for comparison. Tokens of a merged row count once."""
        steps = []
        for index, (stage, answer) in enumerate(zip(self.stages, answers.path, strict=False)):
            step = None if answer.kept is None else _step(answer, gold, is_merged=is_merged)
            stage.add(answer, step, is_final=index == answers.stage, is_merged=is_merged)
            if step is not None:
                steps.append(step)
                if gold is not None and answer.sample.get("label_probs") is not None:
                    stage.sample.add(gold, by_label(answer.sample["label_probs"]))
        has_failed = answers.path[-1].failure is not None
        for stage, answer in zip(
            self.stages[len(answers.path) :], () if has_failed else answers.beyond, strict=False
        ):
            if answer.step.recipe.model != stage.model:
                break
            steps.append(_step(answer, gold, is_merged=is_merged))
        self.curve.add(steps, is_last=has_failed or len(steps) == len(self.stages))

    @property
    def failed(self) -> int:
        """Rows that kept an earlier stage's answer because a later one failed."""
        return sum(stage.failed.total() for stage in self.stages)

    @property
    def first_failure(self) -> str | None:
        return next((stage.first_failure for stage in self.stages if stage.first_failure), None)

    def as_json(self) -> dict[str, Any]:
        stages = [stage.as_json(self.stages[0].rows) for stage in self.stages]
        return {"below": self.below, "failed": self.failed, "stages": stages, "curve": self.curve.points()}


def _step(answer: StepState, gold: str | None, *, is_merged: bool) -> Step:
    """Return an answer for the curve. The job of a merged row has been counted with an equal one."""
    assert answer.kept is not None
    is_right = None if gold is None else as_label(answer.sample["label"]) == gold
    if is_merged:
        return Step(answer.prob, is_right, 0, 0.0)
    usage, timing = answer.kept.get("usage") or {}, answer.kept.get("timing") or {}
    tokens = (usage.get("prompt_tokens") or 0) + (usage.get("completion_tokens") or 0)
    if timing.get("e2e_s") is None or timing.get("queue_s") is None:
        return Step(answer.prob, is_right, tokens, None)
    return Step(answer.prob, is_right, tokens, max(0.0, timing["e2e_s"] - timing["queue_s"]))


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
