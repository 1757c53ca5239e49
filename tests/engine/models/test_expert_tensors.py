"""Experts are read from the mapped file as they are packed: no stacked copy, and pages are released."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from pagemill.engine.errors import ModelLoadError
from pagemill.engine.layers.experts.experts import Experts, StoredExperts
from pagemill.engine.layers.experts.products import PackedGroupedProduct
from pagemill.engine.layers.share import Share
from pagemill.engine.llm import LLM
from pagemill.engine.models.checkpoint import read_tensors
from pagemill.engine.models.expert_tensors import ExpertTensors
from pagemill.engine.models.mapped_pages import MappedPages
from tests.engine.models.families.mixture_cases import MIXTURE_CASES


def resident_bytes(file: Path) -> int:
    """Bytes of a file's mapping that this process has in memory."""
    smaps = Path("/proc/self/smaps").read_text()
    _, is_mapped, after = smaps.partition(str(file))
    return int(after.partition("Rss:")[2].split()[0]) * 1024 if is_mapped else 0


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="the system does not tell")
def test_pages_of_a_file_are_forgotten_and_come_back(tmp_path: Path) -> None:
    weight = torch.randn(1 << 19)
    save_file({"weight": weight}, file := tmp_path / "model.safetensors")
    mapped = read_tensors([file])["weight"]
    assert torch.equal(mapped, weight)
    before = resident_bytes(file)
    MappedPages().forget(mapped)
    assert before >= weight.nbytes
    assert resident_bytes(file) < weight.nbytes // 8
    assert torch.equal(mapped, weight)


def test_other_memory_is_never_forgotten() -> None:
    weight = torch.ones(1 << 19)
    MappedPages().forget(weight)
    assert bool((weight == 1).all())


def test_the_module_gets_placeholders(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["mixtral"]()
    experts = ExpertTensors(checkpoint.tensors, torch.float32)
    stacked = [tensor for name, tensor in experts.others.items() if ".experts." in name]
    assert len(stacked) == 4
    assert all(
        tensor.untyped_storage().nbytes() == 4 for tensor in stacked if isinstance(tensor, torch.Tensor)
    )
    checkpoint.write(tmp_path)
    llm = LLM(str(tmp_path), num_threads=1, num_kv_blocks=16, dtype="float32")
    executor: Any = llm.engine._parts.executor
    found = [part for part in executor._forward_passes[-1]._module.modules() if isinstance(part, Experts)]
    assert len(found) == 2
    for layer in found:
        assert isinstance(layer.inner, PackedGroupedProduct)
        assert not list(layer.parameters())


def test_a_share_has_some_channels_of_every_expert() -> None:
    tensors = MIXTURE_CASES["mixtral"]().tensors
    experts = ExpertTensors(tensors, torch.float32)
    whole = experts.stored("model.layers.0.block_sparse_moe", Share(0, 1), None)
    parts = [experts.stored("model.layers.0.block_sparse_moe", Share(rank, 5), None) for rank in range(5)]
    x = torch.randn(3, 64)

    def output(stored: StoredExperts, expert: int) -> torch.Tensor:
        gate, up = (x @ stored.inner.read(expert).t()).chunk(2, dim=-1)
        return torch.nn.functional.silu(gate) * up @ stored.down.read(expert).t()

    for expert in range(4):
        total = sum((output(part, expert) for part in parts), torch.zeros(()))
        torch.testing.assert_close(total, output(whole, expert), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("part", ["w1", "w2"])
def test_a_missing_expert_is_refused(part: str, tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["mixtral"]()
    lost = f"0.block_sparse_moe.experts.2.{part}"
    tensors = {name: tensor for name, tensor in checkpoint.tensors.items() if lost not in name}
    replace(checkpoint, tensors=tensors).write(tmp_path)
    with pytest.raises(ModelLoadError):
        LLM(str(tmp_path), num_threads=1, num_kv_blocks=16)


def test_experts_of_another_size_are_refused(tmp_path: Path) -> None:
    checkpoint = MIXTURE_CASES["mixtral"]()
    config = checkpoint.config | {"num_local_experts": 5}
    replace(checkpoint, config=config).write(tmp_path)
    with pytest.raises(ModelLoadError, match=r"config\.json asks for"):
        LLM(str(tmp_path), num_threads=1, num_kv_blocks=16)
