"""The executor of a model spread over several ranks: this process's runner, and the plans for the others."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pagemill.engine.devices.backend import DeviceBackend, DeviceEvent
from pagemill.engine.errors import RankLost
from pagemill.engine.execution.model_runner import LaunchedStep, ModelRunner
from pagemill.engine.execution.parallel.plan_delta import encode
from pagemill.engine.execution.parallel.rank_processes import RankProcesses
from pagemill.engine.plan import StepPlan, StepResult

_POLL_S = 50e-6


class TensorParallelExecutor:
    """An `Executor`. A step that fails on any rank is the last, because the ranks are no longer synchronized.

    From then on it raises `RankLost`, and no step is retried.
    """

    def __init__(self, runner: ModelRunner, ranks: RankProcesses, device: DeviceBackend) -> None:
        self._runner = runner
        self._ranks = ranks
        self._device = device

    def launch(self, plan: StepPlan) -> ParallelStep:
        with _fatal(self._ranks):
            self._ranks.send(encode(plan))
            return ParallelStep(self._runner.launch(plan), self._ranks, self._device, self._device.mark())

    def is_device_alive(self) -> bool:
        return self._runner.is_device_alive()

    def close(self) -> None:
        self._runner.close()


@dataclass(slots=True)
class ParallelStep:
    step: LaunchedStep
    ranks: RankProcesses
    device: DeviceBackend
    end: DeviceEvent
    """Event that is reached when the device has finished the step."""

    @property
    def plan(self) -> StepPlan:
        return self.step.plan

    def sample(self) -> None:
        # The other ranks do not sample: their step already ends with the tokens' broadcast.
        with _fatal(self.ranks):
            self.step.sample()
            self.end = self.device.mark()

    def wait(self) -> StepResult:
        with _fatal(self.ranks):
            # On a GPU a collective waits for a dead rank, and so would a wait for the GPU.
            while not self.end.query():
                if (reason := self.ranks.failure()) is not None:
                    raise RankLost(reason)
                time.sleep(_POLL_S)
            return self.step.wait()


@contextmanager
def _fatal(ranks: RankProcesses) -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise ranks.give_up(error) from error
