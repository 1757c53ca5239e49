"""The executor of a model that is spread over several ranks: this process's runner, and the plans for the others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from engine.execution.model_runner import LaunchedStep, ModelRunner
from engine.execution.parallel.plan_delta import encode
from engine.execution.parallel.rank_processes import RankProcesses
from engine.plan import StepPlan, StepResult


class TensorParallelExecutor:
    """An `Executor`. A step that fails anywhere is the last one: the ranks are no longer in step with each other.

    Raises `RankLost` from then on, which no other request is retried after.
    """

    def __init__(self, runner: ModelRunner, ranks: RankProcesses) -> None:
        self._runner = runner
        self._ranks = ranks

    def launch(self, plan: StepPlan) -> ParallelStep:
        with _fatal(self._ranks):
            self._ranks.send(encode(plan))
            return ParallelStep(self._runner.launch(plan), self._ranks)


@dataclass(frozen=True, slots=True)
class ParallelStep:
    step: LaunchedStep
    ranks: RankProcesses

    @property
    def plan(self) -> StepPlan:
        return self.step.plan

    def wait(self) -> StepResult:
        with _fatal(self.ranks):
            return self.step.wait()


@contextmanager
def _fatal(ranks: RankProcesses) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ranks.give_up(error) from error
