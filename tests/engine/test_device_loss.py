"""A device that fails during a step: distinguished from a failed step, and the engine's exit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.builder import build_parts
from pagemill.engine.config import EngineConfig
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.engine import Engine
from pagemill.engine.errors import DeviceLost
from pagemill.engine.execution.model_runner import ModelRunner
from pagemill.engine.llm import LLM
from pagemill.engine.models.echo import EchoRunner, EchoStep
from pagemill.engine.plan import StepPlan, StepResult
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_model import save_tiny_llama

_STICKY = [
    torch.AcceleratorError(
        "CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be..."
    ),
    torch.AcceleratorError("CUDA error: device-side assert triggered"),
    torch.AcceleratorError("CUDA error: unspecified launch failure"),
    torch.AcceleratorError("CUDA error: misaligned address"),
    torch.AcceleratorError("CUDA error: the launch timed out and was terminated"),
    torch.AcceleratorError("CUDA error: uncorrectable ECC error encountered"),
    torch.AcceleratorError("CUDA error: unknown error"),
    RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
    RuntimeError("HIP error: an illegal memory access was encountered"),
    RuntimeError("NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus."),
]
_PASSING = [
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
    torch.AcceleratorError("CUDA error: out of memory"),
    torch.AcceleratorError("CUDA error: invalid configuration argument"),
    ValueError("no RuntimeError: illegal memory access"),
    RuntimeError("shapes do not match: max10"),
]


class DyingRunner:
    """An echo whose step `bad_step` raises, at launch or when it is waited for."""

    def __init__(
        self, error: Exception, *, bad_step: int = 2, at_launch: bool = True, survives: bool = True
    ) -> None:
        self._echo, self._error, self._survives = EchoRunner(), error, survives
        self._bad_step, self._at_launch = bad_step, at_launch
        self.num_launched = 0
        self.num_probes = 0

    def launch(self, plan: StepPlan) -> EchoStep | _DyingStep:
        self.num_launched += 1
        step = self._echo.launch(plan)
        if plan.step_id != self._bad_step:
            return step
        if self._at_launch:
            raise self._error
        return _DyingStep(plan, self._error)

    def is_device_alive(self) -> bool:
        self.num_probes += 1
        return self._survives

    def close(self) -> None:
        pass


class _DyingStep:
    def __init__(self, plan: StepPlan, error: Exception) -> None:
        self.plan, self._error = plan, error

    def sample(self) -> None: ...

    def wait(self) -> StepResult:
        raise self._error


def engine_on(runner: DyingRunner, *, overlapped: bool = False, rows: int = 64) -> Engine:
    config = EngineConfig(model="echo", async_scheduling=overlapped, max_num_seqs=rows)
    return Engine(replace(build_parts(config), executor=runner))


def add(engine: Engine, *names: str) -> None:
    for name in names:
        engine.add_request(name, [97] * 8, SamplingParams(max_tokens=8))


def run(engine: Engine, ends: dict[str, str | None]) -> None:
    """Step to the end; `ends` gets the error code of every request."""
    for _ in range(200):
        if not engine.has_unfinished():
            break
        ends |= {output.request_id: output.error_code for output in engine.step() if output.finished}


@pytest.mark.parametrize("error", _STICKY, ids=lambda error: str(error)[:48])
@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "wait"])
def test_a_sticky_error_ends_the_engine_and_fails_no_request(error: Exception, at_launch: bool) -> None:
    runner = DyingRunner(error, at_launch=at_launch)
    engine = engine_on(runner)
    add(engine, *"abcdef")
    ends: dict[str, str | None] = {}
    with pytest.raises(DeviceLost, match="the device is lost") as lost:
        run(engine, ends)
    assert ends == {}
    assert "\n" not in str(lost.value)
    assert lost.value.__cause__ is error
    assert runner.num_launched == 3, "nothing runs on a dead device"
    with pytest.raises(DeviceLost):
        engine.step()
    assert runner.num_launched == 3


@pytest.mark.parametrize("overlapped", [False, True])
@pytest.mark.parametrize("at_launch", [True, False], ids=["launch", "wait"])
def test_only_requests_in_a_step_that_was_not_collected_are_suspects(
    overlapped: bool, at_launch: bool
) -> None:
    engine = engine_on(DyingRunner(_STICKY[0], at_launch=at_launch), overlapped=overlapped, rows=2)
    add(engine, *"abcdef")
    with pytest.raises(DeviceLost) as lost:
        run(engine, {})
    assert lost.value.request_ids == {"a", "b"}, "the others waited for a row"


def test_a_step_in_flight_is_suspect_when_the_next_one_raises() -> None:
    """The device reports a kernel's fault in any later call."""
    engine = engine_on(DyingRunner(_STICKY[0], bad_step=1), overlapped=True)
    add(engine, "a")
    assert engine.step() == []
    engine._scheduler.abort("a")  # so that it is only in step 0
    add(engine, "b")
    with pytest.raises(DeviceLost) as lost:
        engine.step()
    assert lost.value.request_ids == {"a", "b"}


@pytest.mark.parametrize("error", _PASSING, ids=lambda error: str(error)[:48])
def test_any_other_error_is_recovered_from_while_the_device_lives(error: Exception) -> None:
    runner = DyingRunner(error)
    engine = engine_on(runner)
    add(engine, *"abc")
    ends: dict[str, str | None] = {}
    run(engine, ends)
    assert ends == {"a": None, "b": None, "c": None}
    assert runner.num_probes == 1
    engine.check_integrity()


def test_an_unknown_error_of_a_dead_device_ends_the_engine() -> None:
    engine = engine_on(DyingRunner(RuntimeError("CUBLAS_STATUS_EXECUTION_FAILED"), survives=False))
    add(engine, *"abc")
    with pytest.raises(DeviceLost, match="CUBLAS_STATUS_EXECUTION_FAILED"):
        run(engine, {})


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> LLM:
    directory = tmp_path_factory.mktemp("llama")
    save_tiny_llama(directory)
    return LLM(str(directory), skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=8, num_threads=1)


def raises(error: Exception) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        raise error

    return call


def test_the_probe_asks_the_device(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    runner = llm.engine._parts.executor
    assert isinstance(runner, ModelRunner)
    assert runner.is_device_alive(), "a CPU is"
    monkeypatch.setattr(runner, "_device", CudaBackend())
    for error, lives in ((_STICKY[0], False), (RuntimeError("?"), False), (_PASSING[0], True)):
        monkeypatch.setattr(torch.cuda, "synchronize", raises(error))
        assert runner.is_device_alive() is lives


def test_offline_a_dead_device_is_an_exception_now_and_later(tmp_path: Path) -> None:
    save_tiny_llama(tmp_path)
    llm = LLM(str(tmp_path), skip_tokenizer_init=True, num_kv_blocks=64, max_num_seqs=8, num_threads=1)
    llm.engine._parts.executor.launch = raises(_STICKY[0])  # type: ignore[method-assign]
    for _ in range(2):
        with pytest.raises(DeviceLost, match="illegal memory access"):
            llm.generate([[1, 2, 3], [4, 5]], use_tqdm=False)
