"""A device's memory: freed by `close`, and sized after the weights have their final form."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from pagemill.engine.config import EngineConfig, resolve_limits
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.errors import ConfigError, DeviceLost
from pagemill.engine.execution import cuda_graphs, rehearsal
from pagemill.engine.execution.model_runner import ModelRunner
from pagemill.engine.execution.prepared_model import PreparedModel
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.llm import LLM
from pagemill.engine.models.loader import load_model
from pagemill.engine.plan import StepPlan
from pagemill.engine.sampling_params import SamplingParams
from tests.engine.tiny_model import save_tiny_llama

_SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "num_kv_blocks": 64, "max_num_seqs": 8, "num_threads": 1,
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    save_tiny_llama(path := tmp_path_factory.mktemp("model"))
    return path


@pytest.fixture
def no_collector() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def tensors_of(llm: LLM) -> list[weakref.ref[torch.Tensor]]:
    runner = llm.engine._parts.executor
    assert isinstance(runner, ModelRunner)
    module = runner._model.loaded.module
    layers = [tensor for layer in runner.kv_cache.layers for tensor in layer.tensors()]
    return [weakref.ref(tensor) for tensor in [*module.parameters(), *module.buffers(), *layers]]


@pytest.mark.slow
@pytest.mark.parametrize("is_closed", [True, False], ids=["closed", "dropped"])
@pytest.mark.parametrize("has_graphs", [False, True], ids=["plain", "graphs"])
@pytest.mark.usefixtures("no_collector")
def test_weights_and_caches_go_at_once(
    directory: Path, has_graphs: bool, is_closed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def capture(run: Callable[[], object], pool: list[Any]) -> Callable[[], object]:
        run()
        return lambda: None  # like the replay of a real graph, it does not hold Python objects

    monkeypatch.setattr(cuda_graphs, "capture_graph", capture)
    monkeypatch.setattr(CpuBackend, "captures_graphs", has_graphs)
    llm = LLM(str(directory), **_SETTINGS, enable_prefix_caching=True)
    llm.generate([[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=4)], use_tqdm=False)
    gc.collect()  # memory that compiling has left, if the kernels were not cached
    found = tensors_of(llm)
    assert len(found) > 10
    if is_closed:
        llm.close()
        llm.close()
    else:
        del llm
    assert [each for each in found if each() is not None] == []


def test_a_closed_engine_says_so(directory: Path) -> None:
    llm = LLM(str(directory), **_SETTINGS)
    llm.close()
    with pytest.raises(DeviceLost, match="closed"):
        llm.generate([[1, 2, 3]], use_tqdm=False)


class Watched:
    """A CPU that rehearses: it records the steps, and reports their memory."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, num_bytes: int) -> None:
        self.plans: list[StepPlan] = []
        self.cache_blocks: list[int] = []
        launch = ModelRunner.launch

        def watch(runner: ModelRunner, plan: StepPlan) -> Any:
            self.plans.append(plan)
            self.cache_blocks.append(len(runner.kv_cache.layers[0].keys))
            return launch(runner, plan)

        def peak_bytes(device: CpuBackend, run: Callable[[], None]) -> int:
            run()
            return num_bytes

        monkeypatch.setattr(ModelRunner, "launch", watch)
        monkeypatch.setattr(CpuBackend, "rehearses", True)
        monkeypatch.setattr(CpuBackend, "peak_bytes", peak_bytes)
        monkeypatch.setattr(CpuBackend, "free_bytes", lambda device, config: 2**22)


@pytest.mark.slow
@pytest.mark.parametrize("budget", [5, 64])
def test_a_pool_leaves_room_for_the_largest_step(
    directory: Path, budget: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = _SETTINGS | {"num_kv_blocks": None, "max_num_batched_tokens": budget}
    without = LLM(str(directory), **settings)
    watched = Watched(monkeypatch, 2**20)
    monkeypatch.setattr(CpuBackend, "rehearses", False)
    whole = LLM(str(directory), **settings).engine.limits.num_kv_blocks
    monkeypatch.setattr(CpuBackend, "rehearses", True)
    llm = LLM(str(directory), **settings)
    block_bytes = without.engine._parts.kv_block_bytes
    runner = llm.engine._parts.executor
    assert isinstance(runner, ModelRunner)
    assert llm.engine.limits.num_kv_blocks == (2**22 - 2**20 - runner.table_bytes) // block_bytes
    assert whole == 2**22 // block_bytes
    assert set(watched.cache_blocks) == {2, 26}, "the pool is not allocated before it is sized"
    assert max(plan.num_tokens for plan in watched.plans) == budget
    assert {plan.kind for plan in watched.plans} >= {"prefill", "decode"} - (
        {"prefill"} if budget == 5 else set()
    )
    seen = len(watched.plans)
    (result,) = llm.generate([[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=4)], use_tqdm=False)
    (expected,) = without.generate([[1, 2, 3]], [SamplingParams(temperature=0, max_tokens=4)], use_tqdm=False)
    assert result.outputs[0].token_ids == expected.outputs[0].token_ids
    assert len(watched.plans) > seen


@pytest.mark.slow
def test_int8_weights_enlarge_the_pool(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool is sized when the weights have their final form."""
    monkeypatch.setattr(CpuBackend, "rehearses", True)
    seen: list[int] = []

    def step_bytes(model: Any, *_: Any) -> int:
        linears = [part for part in model.loaded.module.modules() if type(part) is torch.nn.Linear]
        seen.append(len(linears))
        return 0

    monkeypatch.setattr("pagemill.engine.execution.rehearsal.step_bytes", step_bytes)
    LLM(str(directory), **_SETTINGS, quantization="int8")
    assert seen == [0], "all products were replaced before"


def test_a_step_that_does_not_fit_is_a_setting(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Watched(monkeypatch, 0)

    def peak_bytes(device: CpuBackend, run: Callable[[], None]) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CpuBackend, "peak_bytes", peak_bytes)
    with pytest.raises(ConfigError, match="max_num_batched_tokens=512 tokens in max_num_seqs=8 rows"):
        LLM(str(directory), **_SETTINGS, max_num_batched_tokens=512)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_rehearses_before_it_meets_the_others(
    directory: Path, rank: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    watched = Watched(monkeypatch, 2**20)
    config = EngineConfig(model=str(directory), tensor_parallel_size=2, max_num_seqs=4, num_threads=1)
    group, device = RankGroup(rank, 2), CpuBackend()
    loaded = load_model(config, device, group)
    shape = loaded.kv_cache_shape(config.block_size, 64)
    limits = resolve_limits(config, 64, (), device.step_defaults)
    prepared = PreparedModel.from_model(loaded, config, shape, 64)
    tables = 4 * (64 + 1) * 8 + 4 * (64 // shape.block_size) * 4  # tokens and blocks of 4 rows
    assert rehearsal.step_bytes(prepared, config, limits, shape, group) == 2**20 + tables
    assert watched.plans, "the steps ran"


@pytest.mark.parametrize("eager", [False, True])
def test_graphs_have_their_own_share(directory: Path, eager: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    watched = Watched(monkeypatch, 2**20)
    monkeypatch.setattr(CpuBackend, "captures_graphs", True)
    config = EngineConfig(model=str(directory), max_num_seqs=4, num_threads=1, enforce_eager=eager)
    device = CpuBackend()
    loaded = load_model(config, device)
    shape = loaded.kv_cache_shape(config.block_size, 64)
    limits = resolve_limits(config, 64, (), device.step_defaults)
    prepared = PreparedModel.from_model(loaded, config, shape, 64)
    tables = 4 * (64 + 1) * 8 + 4 * (64 // shape.block_size) * 4
    graphs = cuda_graphs.graph_bytes(limits, loaded.vocab_size * 4, 2**20)
    assert graphs > 2**20 + 4 * loaded.vocab_size * 4
    expected = 2**20 + tables + (0 if eager else graphs)
    assert rehearsal.step_bytes(prepared, config, limits, shape) == expected
    decode = watched.plans[-1]
    assert eager or (decode.kind, len(decode.work)) == ("decode", 4)
