"""Problems that are most likely with several GPUs, as far as they can be tested without one."""

from __future__ import annotations

import json
import threading
from datetime import timedelta
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from torch import nn

from pagemill.engine.config import EngineConfig, SchedulerConfig
from pagemill.engine.devices.cpu import CpuBackend
from pagemill.engine.devices.cuda import CudaBackend
from pagemill.engine.devices.registry import find_device
from pagemill.engine.errors import RankLost
from pagemill.engine.execution.parallel.executor import ParallelStep
from pagemill.engine.execution.parallel.messages import Loaded, LoadShare
from pagemill.engine.execution.parallel.rank_processes import RankProcesses, _spawn
from pagemill.engine.layers.rank_group import RankGroup
from pagemill.engine.layers.sharded_linear import GatheredHead, RowParallelLinear
from pagemill.engine.layers.share import Share
from pagemill.engine.plan import StepPlan, StepResult
from tests.worker.harness import PATIENCE_S, eventually

pytestmark = pytest.mark.slow


class Ranks:
    """Processes, one of which has crashed."""

    def __init__(self, asked_before: int) -> None:
        self._asked_before = asked_before

    def failure(self) -> str | None:
        self._asked_before -= 1
        return None if self._asked_before > 0 else "the process of rank 1 was ended by SIGKILL"

    def give_up(self, error: Exception) -> RankLost:
        return RankLost(str(error))


class Device:
    """A mark on a stream: reached after this many queries, or never."""

    def __init__(self, questions: float) -> None:
        self._questions = questions

    def query(self) -> bool:
        self._questions -= 1
        return self._questions < 0


def step(device: Device, ranks: Ranks) -> ParallelStep:
    done = StepResult(1, token_ids=[[7]], prepare_s=0.0, forward_s=0.0, sample_s=0.0)
    launched = SimpleNamespace(plan=StepPlan(1), wait=lambda: done)
    return ParallelStep(cast(Any, launched), cast(Any, ranks), cast(Any, None), cast(Any, device))


def test_a_step_is_not_waited_for_beside_a_dead_rank() -> None:
    """With NCCL the device itself would wait for minutes, and block every thread that waits for the device."""
    with pytest.raises(RankLost, match="rank 1 was ended by SIGKILL"):
        step(Device(float("inf")), Ranks(asked_before=5)).wait()


def test_a_step_that_ends_is_collected_whatever_becomes_of_the_ranks_after_it() -> None:
    assert step(Device(3), Ranks(asked_before=100)).wait().token_ids == [[7]]
    assert step(Device(0), Ranks(asked_before=0)).wait().token_ids == [[7]]


@pytest.mark.parametrize("name", ["cuda", "auto"])
def test_each_rank_takes_the_gpu_of_its_number(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for rank 0: the surrounding program may have chosen another one for itself."""
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    for rank in range(2):
        find_device(name).claim(rank)
        find_device("cpu").claim(rank)
    assert taken == [0, 1]


class Nccl:
    """Replaces torch's group: records its arguments, and accepts the same operations as NCCL."""

    class Options:
        _timeout = timedelta(0)

    made: Any = None

    def __init__(self, store: Any, rank: int, size: int, options: Any) -> None:
        Nccl.made = self
        self.rank, self.size, self.options = rank, size, options
        self.calls: list[str] = []

    def _done(self, name: str) -> Any:
        self.calls.append(name)
        return SimpleNamespace(wait=lambda: None)

    def allreduce(self, tensors: list[torch.Tensor]) -> Any:
        assert all(tensor.is_contiguous() for tensor in tensors)
        return self._done("allreduce")

    def gather(self, outputs: list[list[torch.Tensor]], inputs: list[torch.Tensor], options: Any) -> Any:
        assert options.rootRank == 0
        assert len(inputs) == 1
        assert [len(group) for group in outputs] == ([self.size] if self.rank == 0 else [])
        return self._done("gather")

    def abort(self) -> None:
        self._done("abort")


@pytest.mark.parametrize("rank", [0, 1])
def test_nccl_meets_the_others_at_once_and_lets_go_of_them_at_the_end(
    rank: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dist, "ProcessGroupNCCL", Nccl, raising=False)
    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda *shape, device: zeros(*shape))
    group = RankGroup(rank, 2)
    group.connect(str(tmp_path / "store"), CudaBackend().collectives)
    assert Nccl.made.calls == ["allreduce"]
    assert Nccl.made.options._timeout > timedelta(seconds=60)
    assert len(group.gather(torch.ones(2, 3))) == (2 if rank == 0 else 0)
    group.close()
    group.close()
    assert Nccl.made.calls == ["allreduce", "gather", "abort"]


LIMITS = SchedulerConfig(
    block_size=16, num_kv_blocks=4, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16
)


def tiny(directory: Path) -> EngineConfig:
    """A model for two ranks, in `directory`."""
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 61, "hidden_size": 32,
        "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 64,
    }  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    return EngineConfig(
        model=str(directory), device="cpu", load_format="dummy", num_kv_blocks=4, tensor_parallel_size=2,
        skip_tokenizer_init=True, num_threads=1,
    )  # fmt: skip


def test_a_rank_that_waits_for_the_others_sees_rank_0_go(tmp_path: Path) -> None:
    """A rendezvous waits for minutes, and holds a GPU's memory."""
    settings = tiny(tmp_path)
    ours, theirs = Pipe()
    with theirs:
        rank = _spawn(theirs.fileno(), 1)
    try:
        ours.send(LoadShare(settings, 1, str(tmp_path / "store")))
        assert ours.poll(PATIENCE_S)
        assert isinstance(ours.recv(), Loaded)
        ours.send(LIMITS)
        # It has registered: the rendezvous is in progress.
        eventually(lambda: (tmp_path / "store").exists() and (tmp_path / "store").stat().st_size, "the rank")
        assert rank.poll() is None
        ours.close()
        assert rank.wait(PATIENCE_S) == 0
    finally:
        rank.kill()
        rank.wait()


def test_rank_0_does_not_wait_for_a_rank_that_dies_on_its_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    ranks = RankProcesses(tiny(tmp_path))

    def connect(rendezvous: str, collectives: object) -> None:
        (rank,) = ranks._processes
        rank.kill()
        never.wait()

    monkeypatch.setattr(ranks.group, "connect", connect)
    try:
        with pytest.raises(RankLost, match="the process of rank 1 was ended by SIGKILL"):
            ranks.agree(LIMITS, CpuBackend())
    finally:
        never.set()
        ranks.close()


def test_all_of_a_split_layer_moves_to_the_device() -> None:
    group = RankGroup(0, 2)
    whole = nn.Linear(6, 9)
    for layer in (GatheredHead(whole, Share(0, 2), group), RowParallelLinear(3, 9, group)):
        state = [value for value in vars(layer).values() if isinstance(value, torch.Tensor)]
        assert not state, "a plain attribute stays where it was made"
        layer.to("meta")
        assert {tensor.device.type for tensor in [*layer.parameters(), *layer.buffers()]} == {"meta"}
        assert len([*layer.parameters(), *layer.buffers()]) == 2
